"""The C++ of `ops.random.philox`'s uniform numbers, for all that draws them on a CPU."""

PHILOX_TYPES = """\
typedef __UINT8_TYPE__ u8; typedef __UINT32_TYPE__ u32; typedef __INT64_TYPE__ i64; typedef __UINT64_TYPE__ u64;
#define INLINE static inline __attribute__((always_inline))
"""

# Uniform in [0, 1): the elements from `first` on of the draw whose counter's upper words are `position`.
PHILOX_ROWS = """\
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
    for (int round = 0; round < 10; round++) {
      #pragma GCC unroll 8
      for (int part = 0; part < PARTS; part++) {
        const wide a = products_(c0[part], wide{} + 0xD2511F53u), b = products_(c2[part], wide{} + 0xCD9E8D57u);
        c0[part] = (b >> 32) ^ c1[part] ^ k0; c2[part] = (a >> 32) ^ c3[part] ^ k1;
        c1[part] = b; c3[part] = a;
      }
      k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
    }
    u64 pairs[32]; float lanes[64];
    for (int part = 0; part < PARTS; part++) {
      const wide low = (c0[part] & 0xffffffffu) | (c1[part] << 32), high = (c2[part] & 0xffffffffu) | (c3[part] << 32);
      for (int i = 0; i < LANES; i++) {
        pairs[2 * (part * LANES + i)] = low[i]; pairs[2 * (part * LANES + i) + 1] = high[i];
      }
    }
    for (int i = 0; i < 32; i++) {
      lanes[2 * i] = (float)((u32)pairs[i] >> 8) * 5.96046448e-8f;
      lanes[2 * i + 1] = (float)(u32)(pairs[i] >> 40) * 5.96046448e-8f;
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
"""
