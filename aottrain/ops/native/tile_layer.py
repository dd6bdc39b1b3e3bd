"""The C++ that texts by a processor's tiles (Intel's AMX) stand on: a thread's tiles, and vectors beside them.

Each thread of a parallel region makes a `Tiles` before its first product. The process must have been given tiles by the
system: `allowed` asks for them.
"""

ALLOWED = """\
#if defined(__AMX_BF16__) && defined(__AVX512DQ__)
#include <sys/syscall.h>
#include <unistd.h>
// Whether this process may use tiles: Linux gives their memory to those that ask.
extern "C" int allowed(void) {
  static int answer = -1;  // a constant: what is found at the first call takes a lock of the library of C++
  if (answer < 0) answer = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return answer;
}
#else
extern "C" int allowed(void) { return 0; }
#endif
"""

TILE_STATE = """\
struct __attribute__((packed)) Config { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; };
// A thread's tiles, all of 16 rows of 64 bytes, and after it those that it had before.
struct Tiles {
  Config before;
  Tiles() {
    _tile_storeconfig(&before);
    Config own{};
    own.palette = 1;
    for (int t = 0; t < 8; t++) { own.bytes[t] = 64; own.rows[t] = 16; }
    _tile_loadconfig(&own);
  }
  ~Tiles() { if (before.palette) _tile_loadconfig(&before); else _tile_release(); }
};"""

TRANSPOSE = """\
// Sixteen rows of sixteen numbers of 32 bits.
static inline __attribute__((always_inline)) void transpose(__m512i r[16]) {
  __m512i t[16];
  UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < 16; i += 4)
    UNROLL for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
  UNROLL for (int i = 0; i < 4; i++)
    UNROLL for (int j = 0; j < 2; j++) {
      t[8 * j + i] = _mm512_shuffle_i32x4(r[8 * j + i], r[8 * j + 4 + i], 0x88);
      t[8 * j + 4 + i] = _mm512_shuffle_i32x4(r[8 * j + i], r[8 * j + 4 + i], 0xdd);
    }
  UNROLL for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
  }
}
""".replace("UNROLL", '_Pragma("GCC unroll 16")')

# Sixteen numbers (vec), 32 of bfloat16 (line), and products of tiles: by the processor's. u16 pointers are to bfloat16.
_BY_PROCESSOR = """\
struct vec {
  __m512 v;
  INSIDE vec() {}
  INSIDE vec(float x) : v(_mm512_set1_ps(x)) {}
  INSIDE vec(__m512 x) : v(x) {}
};
struct line { __m512i v; };
INLINE vec operator+(vec a, vec b) { return _mm512_add_ps(a.v, b.v); }
INLINE vec operator-(vec a, vec b) { return _mm512_sub_ps(a.v, b.v); }
INLINE vec operator*(vec a, vec b) { return _mm512_mul_ps(a.v, b.v); }
INLINE vec fma_(vec a, vec b, vec c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
INLINE vec rint_(vec x) { return _mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vec larger(vec x, vec m) { return _mm512_max_ps(x.v, m.v); }
INLINE vec where(u32 mask, vec x, vec other) { return _mm512_mask_mov_ps(other.v, (__mmask16)mask, x.v); }
INLINE bool differ(vec x, vec y) { return _mm512_cmp_ps_mask(x.v, y.v, _CMP_NEQ_UQ) != 0; }
INLINE vec exp_(vec x) {
  const __m512 low = _mm512_set1_ps(-87.0f);
  vec n;
  const vec part = reduced_exp_(vec(_mm512_max_ps(low, x.v)), n);  // NaN where x is
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.v, low, _CMP_NLT_UQ), part.v, n.v);
}
INLINE vec load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void save(float* p, vec x) { _mm512_storeu_ps(p, x.v); }
INLINE line load(const u16* p) { return {_mm512_loadu_si512(p)}; }
INLINE void save(u16* p, line x) { _mm512_storeu_si512(p, x.v); }
INLINE __mmask32 upto(int64_t n) { return n >= SIDE ? 0xFFFFFFFF : n <= 0 ? 0 : (1u << n) - 1; }
INLINE line fetch(const bf16* p, int64_t n) { return {_mm512_maskz_loadu_epi16(upto(n), p)}; }
INLINE void put(bf16* p, int64_t n, line x) { _mm512_mask_storeu_epi16(p, upto(n), x.v); }
INLINE line rounded(vec low, vec high) { return {(__m512i)_mm512_cvtne2ps_pbh(high.v, low.v)}; }
INLINE vec even(line x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x.v, 16)); }
INLINE vec odd(line x) { return _mm512_castsi512_ps(_mm512_and_si512(x.v, _mm512_set1_epi32((int)0xFFFF0000))); }
INLINE void interleave(line a, line b, u16* out) {
  const __m512i low = _mm512_unpacklo_epi16(a.v, b.v), high = _mm512_unpackhi_epi16(a.v, b.v);
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  _mm512_storeu_si512(out, _mm512_permutex2var_epi64(low, first, high));
  _mm512_storeu_si512(out + TILE, _mm512_permutex2var_epi64(low, second, high));
}
INLINE void turn(const void* x, int64_t step, void* out, int64_t out_step) {
  __m512i r[HALF];
  UNROLL for (int i = 0; i < HALF; i++) r[i] = _mm512_loadu_si512((const u32*)x + i * step);
  transpose(r);
  UNROLL for (int i = 0; i < HALF; i++) _mm512_storeu_si512((u32*)out + i * out_step, r[i]);
}
#define REGISTERS
#define ZERO(t) _tile_zero(t);
#define LOAD(t, p, step) _tile_loadd(t, p, 4 * (step));
#define SAVE(t, p, step) _tile_stored(t, p, 4 * (step));
#define MULTIPLY(out, a, b) _tile_dpbf16ps(out, a, b);
"""

# The same by loops, for tests. Of numbers that are not denormal both give the same, bit for bit.
_BY_LOOPS = """\
#define EACH for (int i = 0; i < HALF; i++)
struct vec {
  float x[HALF];
  vec() {}
  vec(float number) { EACH x[i] = number; }
};
struct line { u16 x[SIDE]; };
INLINE vec operator+(vec a, vec b) { EACH a.x[i] += b.x[i]; return a; }
INLINE vec operator-(vec a, vec b) { EACH a.x[i] -= b.x[i]; return a; }
INLINE vec operator*(vec a, vec b) { EACH a.x[i] *= b.x[i]; return a; }
INLINE vec fma_(vec a, vec b, vec c) { EACH c.x[i] = fma_(a.x[i], b.x[i], c.x[i]); return c; }
INLINE vec larger(vec x, vec m) { EACH m.x[i] = x.x[i] > m.x[i] ? x.x[i] : m.x[i]; return m; }
INLINE vec where(u32 mask, vec x, vec other) { EACH x.x[i] = mask >> i & 1 ? x.x[i] : other.x[i]; return x; }
INLINE bool differ(vec x, vec y) { bool any = false; EACH any |= x.x[i] != y.x[i]; return any; }
INLINE vec exp_(vec x) { EACH x.x[i] = exp_(x.x[i]); return x; }
INLINE vec load(const float* p) { vec x; memcpy(x.x, p, sizeof x); return x; }
INLINE void save(float* p, vec x) { memcpy(p, &x, sizeof x); }
INLINE line load(const u16* p) { line x; memcpy(&x, p, sizeof x); return x; }
INLINE void save(u16* p, line x) { memcpy(p, &x, sizeof x); }
INLINE line fetch(const bf16* p, int64_t n) {
  line x{};
  for (int64_t i = 0; i < least(n, SIDE); i++) x.x[i] = p[i].bits;
  return x;
}
INLINE void put(bf16* p, int64_t n, line x) { for (int64_t i = 0; i < least(n, SIDE); i++) p[i].bits = x.x[i]; }
INLINE line rounded(vec low, vec high) {
  line y;
  EACH { y.x[i] = to_bf16(low.x[i]).bits; y.x[HALF + i] = to_bf16(high.x[i]).bits; }
  return y;
}
INLINE vec even(line x) { vec y; EACH y.x[i] = widen(bf16{x.x[2 * i]}); return y; }
INLINE vec odd(line x) { vec y; EACH y.x[i] = widen(bf16{x.x[2 * i + 1]}); return y; }
INLINE void interleave(line a, line b, u16* out) {
  for (int i = 0; i < SIDE; i++) {
    u16* pair = out + i / HALF * TILE + i % HALF * 2;
    pair[0] = a.x[i];
    pair[1] = b.x[i];
  }
}
INLINE void turn(const void* x, int64_t step, void* out, int64_t out_step) {
  EACH for (int j = 0; j < HALF; j++)
    memcpy((char*)out + 4 * (j * out_step + i), (const char*)x + 4 * (i * step + j), 4);
}
struct tile { vec rows[HALF]; };
INLINE void zero(tile& t) { EACH t.rows[i] = 0.0f; }
INLINE void fill(tile& t, const void* p, int64_t step) { EACH memcpy(&t.rows[i], (const char*)p + 4 * i * step, 64); }
INLINE void keep(const tile& t, void* p, int64_t step) { EACH memcpy((char*)p + 4 * i * step, &t.rows[i], 64); }
static void multiply(tile& out, const tile& a, const tile& b) {
  for (int row = 0; row < HALF; row++) {
    line left, right;
    memcpy(&left, &a.rows[row], 64);
    vec first = 0.0f, second = 0.0f;  // in the processor's order: even terms and odd ones have a sum each
    for (int k = 0; k < HALF; k++) {
      memcpy(&right, &b.rows[k], 64);
      first = fma_(widen(bf16{left.x[2 * k]}), even(right), first);
      second = fma_(widen(bf16{left.x[2 * k + 1]}), odd(right), second);
    }
    out.rows[row] = out.rows[row] + (first + second);
  }
}
#define REGISTERS tile registers_[8];
#define ZERO(t) zero(registers_[t]);
#define LOAD(t, p, step) fill(registers_[t], p, step);
#define SAVE(t, p, step) keep(registers_[t], p, step);
#define MULTIPLY(out, a, b) multiply(registers_[out], registers_[a], registers_[b]);
struct Tiles { Tiles() {} };
"""

# A text defines SIDE, HALF and TILE before it: 32, 16 and the numbers of a tile.
TILE_LAYER = f"""\
#define UNROLL _Pragma("GCC unroll 16")
#define INSIDE __attribute__((always_inline))
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512DQ__) && !defined(EMULATED)
#include <immintrin.h>
{TRANSPOSE}{_BY_PROCESSOR}{TILE_STATE}
#else
{_BY_LOOPS}
#endif
"""
