"""The C++ of `ops.random.philox`'s numbers, for all that draws them on a CPU."""

from string import Template

from aottrain.ops.philox_constants import FLOAT_BITS, KEY_STEPS, MULTIPLIERS, NUM_ROUNDS

_NUMBERS = {
    **{f"MULTIPLIER_{i}": f"0x{number:X}u" for i, number in enumerate(MULTIPLIERS)},
    **{f"KEY_STEP_{i}": f"0x{number:X}u" for i, number in enumerate(KEY_STEPS)},
    "NUM_ROUNDS": str(NUM_ROUNDS),
    "SHIFT": str(32 - FLOAT_BITS),
    "UPPER_SHIFT": str(64 - FLOAT_BITS),  # of the second of two words in 64 bits
    "UNIT": f"{2.0**-FLOAT_BITS:.8e}f".replace("e-0", "e-"),
}

# Uniform in [0, 1): one element of the draw whose counter's upper words are `position`.
PHILOX_ELEMENT = Template("""\
// Philox4x32-10: the four words of a block.
INLINE void philox_words_(u64 seed, u64 position, u64 block, u32& c0, u32& c1, u32& c2, u32& c3) {
  c0 = (u32)block; c1 = (u32)(block >> 32); c2 = (u32)position; c3 = (u32)(position >> 32);
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
  #pragma GCC unroll $NUM_ROUNDS
  for (int round = 0; round < $NUM_ROUNDS; round++) {
    const u64 a = (u64)c0 * $MULTIPLIER_0, b = (u64)c2 * $MULTIPLIER_1;
    const u32 n0 = (u32)(b >> 32) ^ c1 ^ k0, n2 = (u32)(a >> 32) ^ c3 ^ k1;
    c0 = n0; c1 = (u32)b; c2 = n2; c3 = (u32)a;
    k0 += $KEY_STEP_0; k1 += $KEY_STEP_1;
  }
}
INLINE float uniform_(u32 word) { return (float)(word >> $SHIFT) * $UNIT; }
// Word `element % 4` of block `element / 4`.
INLINE float philox_(u64 seed, u64 position, u64 element) {
  u32 c0, c1, c2, c3;
  philox_words_(seed, position, element >> 2, c0, c1, c2, c3);
  const u32 lane = (u32)element & 3u;
  return uniform_(lane == 0 ? c0 : (lane == 1 ? c1 : (lane == 2 ? c2 : c3)));
}
""").substitute(_NUMBERS)

# Uniform in [0, 1): the elements from `first` on of the draw whose counter's upper words are `position`.
PHILOX_ROWS = Template("""\
// Philox4x32-10 for a run of elements, four to a block, whose words are the lower halves of 64 bits; what is in the
// upper halves reaches no result. g++ has no other way to multiply lower halves alone.
#if defined(__AVX512F__) && __has_builtin(__builtin_ia32_pmuludq512_mask)
typedef u64 wide __attribute__((vector_size(64)));
typedef int halves __attribute__((vector_size(64)));
typedef long long whole __attribute__((vector_size(64)));
INLINE wide products_(wide a, wide b) {
  return (wide)__builtin_ia32_pmuludq512_mask((halves)a, (halves)b, whole{}, (u8)255);
}
#elif defined(__AVX2__) && __has_builtin(__builtin_ia32_pmuludq256)
typedef u64 wide __attribute__((vector_size(32)));
typedef int halves __attribute__((vector_size(32)));
INLINE wide products_(wide a, wide b) { return (wide)__builtin_ia32_pmuludq256((halves)a, (halves)b); }
#else
typedef u64 wide __attribute__((vector_size(8)));
INLINE wide products_(wide a, wide b) { return (a & 0xffffffffu) * (b & 0xffffffffu); }
#endif
INLINE void philox_row(u64 seed, u64 position, u64 first, i64 count, float* __restrict out) {
  enum { LANES = sizeof(wide) / 8, PARTS = 16 / LANES };
  const u64 begin = first >> 2, end = (first + (u64)count + 3) >> 2;
  wide numbers[PARTS];
  for (int i = 0; i < 16; i++) numbers[i / LANES][i % LANES] = (u64)i;
  for (u64 block = begin; block < end; block += 16) {
    wide c0[PARTS], c1[PARTS], c2[PARTS], c3[PARTS];
    for (int part = 0; part < PARTS; part++) {
      c0[part] = numbers[part] + block;
      c1[part] = c0[part] >> 32; c2[part] = wide{} + position; c3[part] = wide{} + (position >> 32);
    }
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
    for (int round = 0; round < $NUM_ROUNDS; round++) {
      #pragma GCC unroll 8
      for (int part = 0; part < PARTS; part++) {
        const wide a = products_(c0[part], wide{} + $MULTIPLIER_0), b = products_(c2[part], wide{} + $MULTIPLIER_1);
        c0[part] = (b >> 32) ^ c1[part] ^ k0; c2[part] = (a >> 32) ^ c3[part] ^ k1;
        c1[part] = b; c3[part] = a;
      }
      k0 += $KEY_STEP_0; k1 += $KEY_STEP_1;
    }
    u64 pairs[32]; float lanes[64];
    for (int part = 0; part < PARTS; part++) {
      const wide low = (c0[part] & 0xffffffffu) | (c1[part] << 32), high = (c2[part] & 0xffffffffu) | (c3[part] << 32);
      for (int i = 0; i < LANES; i++) {
        pairs[2 * (part * LANES + i)] = low[i]; pairs[2 * (part * LANES + i) + 1] = high[i];
      }
    }
    for (int i = 0; i < 32; i++) {
      lanes[2 * i] = (float)((u32)pairs[i] >> $SHIFT) * $UNIT;
      lanes[2 * i + 1] = (float)(u32)(pairs[i] >> $UPPER_SHIFT) * $UNIT;
    }
    const i64 from = (i64)(block * 4) - (i64)first;
    const i64 low = from < 0 ? -from : 0, high = count - from < 64 ? count - from : 64;
    if (high - low == 64) {  // known lengths are a few moves, others a call
      for (int i = 0; i < 64; i++) out[from + i] = lanes[i];
    } else {
      for (i64 i = low; i < high; i++) out[from + i] = lanes[i];
    }
  }
}
""").substitute(_NUMBERS)

# Standard normal by the Box-Muller transform: each two uniform numbers are a radius and an angle. Stands after `FMA`,
# `LOG` and `QUADRANT` of the shared parts, and after both texts above.
PHILOX_NORMALS = """\
INLINE float radius_(float uniform) { return __builtin_sqrtf(-2.0f * log_(1.0f - uniform)); }
// The cosine (1) or the sine (0) of so much of a full turn.
INLINE float turned_(float uniform, i32 quarter) {
  const float quarters = 4.0f * uniform, k = __builtin_rintf(quarters);
  return quadrant_((quarters - k) * 1.57079633f, (i32)k + quarter);
}
INLINE float philox_normal_(u64 seed, u64 position, u64 element) {
  u32 c0, c1, c2, c3;
  philox_words_(seed, position, element >> 2, c0, c1, c2, c3);
  const bool upper = (element & 2u) != 0;
  return radius_(uniform_(upper ? c2 : c0)) * turned_(uniform_(upper ? c3 : c1), 1 - (i32)(element & 1u));
}
// The elements from `first` on: pairs begin at even ones.
INLINE void philox_normal_row(u64 seed, u64 position, u64 first, i64 count, float* __restrict out) {
  enum { CHUNK = 1024 };
  for (i64 start = -(i64)(first & 1u); start < count; start += CHUNK) {
    const i64 left = count - start < CHUNK ? count - start : CHUNK, pairs = (left + 1) / 2, skipped = start < 0;
    alignas(64) float uniform[CHUNK], both[CHUNK];
    philox_row(seed, position, first + (u64)start, 2 * pairs, uniform);
    #pragma omp simd
    for (i64 i = 0; i < pairs; i++) {
      const float radius = radius_(uniform[2 * i]);
      both[2 * i] = radius * turned_(uniform[2 * i + 1], 1);
      both[2 * i + 1] = radius * turned_(uniform[2 * i + 1], 0);
    }
    __builtin_memcpy(out + start + skipped, both + skipped, (u64)(left - skipped) * sizeof(float));
  }
}
"""
