"""The C++ of `ops.products.pieces`: matrix products by a processor's bfloat16 tiles (Intel's AMX).

Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations",
ARITH 2019. A float32 number is the sum of three pieces of bfloat16, without a rounding. Of the nine products of their
pieces six are summed, in float32; what is left out is below 2^-22 of the product. Two pieces, rounded, and three
products leave out up to 2^-15 of it, of either sign.

Numbers that are infinite or NaN have no such pieces: they are found while packing, and the call says so. Pieces below
the smallest normal number count as 0.

Operands of bfloat16 are multiplied as they are, and summed in float32: a result of bfloat16 is rounded once.
"""

from string import Template

from aottrain.ir.kernels.tiles import DEEP, DEEPER, FEW, SIDE, STEP
from aottrain.ops.native.shared import FLOATS, INTEGERS
from aottrain.ops.native.tile_layer import ALLOWED, TILE_STATE, TRANSPOSE

_TEXT = Template("""\
#include <cstdint>
#include <cstring>
$ALLOWED
enum : i64 { SIDE = $SIDE, STEP = $STEP, DEEP = $DEEP, DEEPER = $DEEPER, FEW = $FEW, HALF = 16, TILE = HALF * STEP };
// Element (i, k), where i is a row of the left operand or a column of the right one. One of the steps is 1.
template <class T> struct Operand { const T* first; i64 count, terms, step, term_step; };
// What is packed of `wide` columns of the right operand, and by each thread of `tall` rows of the left one; sums.
struct Memory { uint16_t *shared, *each; i64 each_size, tall, wide; float* sums; };
static inline constexpr i64 deepest(int pieces) { return pieces == 1 ? DEEPER : DEEP; }
static inline i64 least(i64 a, i64 b) { return a < b ? a : b; }
#if defined(__AMX_BF16__) && defined(__AVX512DQ__)
#include <immintrin.h>
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);
static inline __mmask16 upto(i64 n) { return n >= HALF ? 0xFFFF : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }
static inline __mmask32 left_of(i64 n) { return n >= SIDE ? 0xFFFFFFFF : n <= 0 ? 0 : (1u << n) - 1; }
// A piece: the upper 16 bits. Of three pieces each is what fits, and their sum exact; of two it is rounded to nearest.
template <int P> static inline __m512i high(__m512 x) {
  __m512i u = _mm512_castps_si512(x);
  if (P == 2) {
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    u = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  }
  return _mm512_and_si512(u, _mm512_set1_epi32((int)0xFFFF0000));
}
// Of infinities and NaNs.
static inline __mmask16 unbounded(__m512 x) { return _mm512_fpclass_ps_mask(x, 0x99); }
// Of these too, and of numbers that are rounded to infinity.
static inline __mmask16 large(__m512 x) {
  const __m512i size = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
  return _mm512_cmpge_epi32_mask(size, _mm512_set1_epi32(0x7F7F8000));
}
$TRANSPOSE
// For each of P pieces a tile of 16 rows or columns from i on, and STEP terms from k on, two terms in 32 bits.
// right: a row of the tile has 16 columns and a pair of terms, as the right operand of a product of tiles; else it has
// one row, and 16 pairs. along: the terms lie beside each other; whole: all these rows and terms are the operand's.
template <int P, bool right, bool along, bool whole>
static inline __mmask16 pack(const Operand<float>& x, i64 i, i64 k, uint16_t* out) {
  __m512i r[P][HALF];
  __mmask16 bad = 0;
  for (int row = 0; row < HALF; row++) {
    const float* p = along ? x.first + (i + row) * x.step + k : x.first + (k + 2 * row) * x.term_step + i;
    const float* q = along ? p + HALF : p + x.term_step;
    __m512 a, b;
    if (whole) {
      a = _mm512_loadu_ps(p);
      b = _mm512_loadu_ps(q);
    } else if (along) {
      const i64 left = i + row < x.count ? x.terms - k : 0;
      a = _mm512_maskz_loadu_ps(upto(left), p);
      b = _mm512_maskz_loadu_ps(upto(left - HALF), q);
    } else {
      const i64 left = x.terms - k - 2 * row;
      a = _mm512_maskz_loadu_ps(left > 0 ? upto(x.count - i) : 0, p);
      b = _mm512_maskz_loadu_ps(left > 1 ? upto(x.count - i) : 0, q);
    }
    bad |= unbounded(a) | unbounded(b);
    for (int piece = 0; piece < P; piece++) {
      const __m512i u = high<P>(a), v = high<P>(b);
      if (along) {
        const __m256i first = _mm512_cvtepi32_epi16(_mm512_srli_epi32(u, 16));
        const __m256i second = _mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16));
        r[piece][row] = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
      } else {
        r[piece][row] = _mm512_or_si512(_mm512_srli_epi32(u, 16), v);
      }
      a = _mm512_sub_ps(a, _mm512_castsi512_ps(u));
      b = _mm512_sub_ps(b, _mm512_castsi512_ps(v));
      if (P == 2) bad |= unbounded(a) | unbounded(b);  // a number was rounded to infinity
    }
  }
  for (int piece = 0; piece < P; piece++) {
    if (along == right) transpose(r[piece]);
    for (int row = 0; row < HALF; row++) _mm512_storeu_si512(out + piece * 2 * TILE + row * STEP, r[piece][row]);
  }
  return bad;
}
// Of SIDE rows or columns: of each piece two tiles.
template <int P, bool right, bool along, bool whole>
static inline int pack_tiles(const Operand<float>& x, i64 i, i64 k, uint16_t* out) {
  return (pack<P, right, along, whole>(x, i, k, out) | pack<P, right, along, whole>(x, i + HALF, k, out + TILE)) != 0;
}
static inline void keep(__m512i r[HALF], bool turns, uint16_t* out) {
  if (turns) transpose(r);
  for (int row = 0; row < HALF; row++) _mm512_storeu_si512(out + row * STEP, r[row]);
}
// The same of numbers that are pieces themselves.
template <int, bool right, bool along, bool whole>
static inline int pack_tiles(const Operand<bf16>& x, i64 i, i64 k, uint16_t* out) {
  __m512i r[2][HALF];
  if (along) {
    const __mmask32 terms = left_of(x.terms - k);
    for (int row = 0; row < SIDE; row++) {
      const bf16* p = x.first + (i + row) * x.step + k;
      __m512i& line = r[row / HALF][row % HALF];
      line = whole ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16(i + row < x.count ? terms : 0, p);
    }
  } else {
    const __mmask32 columns = left_of(x.count - i);
    for (int row = 0; row < HALF; row++) {
      const bf16* p = x.first + (k + 2 * row) * x.term_step + i;
      const i64 left = x.terms - k - 2 * row;
      const __m512i a = whole ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16(left > 0 ? columns : 0, p);
      const __m512i b = whole ? _mm512_loadu_si512(p + x.term_step)
                              : _mm512_maskz_loadu_epi16(left > 1 ? columns : 0, p + x.term_step);
      const __m512i lower = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(a));
      const __m512i upper = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(a, 1));
      const __m512i lower_b = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(b));
      const __m512i upper_b = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(b, 1));
      r[0][row] = _mm512_or_si512(lower, _mm512_slli_epi32(lower_b, 16));
      r[1][row] = _mm512_or_si512(upper, _mm512_slli_epi32(upper_b, 16));
    }
  }
  keep(r[0], along == right, out);
  keep(r[1], along == right, out + TILE);
  return 0;
}
template <int P, bool right, class T>
static inline int pack_block(const Operand<T>& x, i64 i, i64 k, uint16_t* out) {
  const bool whole = i + SIDE <= x.count && k + STEP <= x.terms;
  if (x.term_step == 1)
    return whole ? pack_tiles<P, right, true, true>(x, i, k, out) : pack_tiles<P, right, true, false>(x, i, k, out);
  return whole ? pack_tiles<P, right, false, true>(x, i, k, out) : pack_tiles<P, right, false, false>(x, i, k, out);
}
// Blocks `from` to `to`, `num` steps each, in the order in which the operand lies in memory.
template <int P, bool right, class T>
static inline int pack_blocks(const Operand<T>& x, i64 start, i64 from, i64 to, i64 term, i64 num, uint16_t* out) {
  const i64 size = 2 * P * TILE;
  int bad = 0;
  if (x.term_step == 1) {
    for (i64 i = from; i < to; i++)
      for (i64 k = 0; k < num; k++)
        bad |= pack_block<P, right>(x, start + i * SIDE, term + k * STEP, out + (i * num + k) * size);
  } else {
    for (i64 k = 0; k < num; k++)
      for (i64 i = from; i < to; i++)
        bad |= pack_block<P, right>(x, start + i * SIDE, term + k * STEP, out + (i * num + k) * size);
  }
  return bad;
}
#define LEFT(p) { _tile_loadd(4, a + (p) * 2 * TILE, 64); _tile_loadd(5, a + (p) * 2 * TILE + TILE, 64); }
#define RIGHT(p) { _tile_loadd(6, b + (p) * 2 * TILE, 64); _tile_loadd(7, b + (p) * 2 * TILE + TILE, 64); }
#define MULTIPLY \\
  { _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7); }
#define CORNERS(move) \\
  { move(0, out, 4 * step); move(1, out + HALF, 4 * step); \\
    move(2, out + HALF * step, 4 * step); move(3, out + HALF * step + HALF, 4 * step); }
// SIDE x SIDE of sums, from `num` steps of packed terms. It goes on with what is in them, or not.
template <int P>
static inline void sum(const uint16_t* a, const uint16_t* b, i64 num, float* out, i64 step, bool goes_on) {
  if (goes_on) CORNERS(_tile_loadd)
  else { _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); }
  for (i64 k = 0; k < num; k++, a += 2 * P * TILE, b += 2 * P * TILE) {
    LEFT(0) RIGHT(0) MULTIPLY
    if (P == 1) continue;
    if (P == 3) { RIGHT(2) MULTIPLY }
    RIGHT(1) MULTIPLY
    LEFT(1)
    if (P == 3) MULTIPLY
    RIGHT(0) MULTIPLY
    if (P == 3) { LEFT(2) MULTIPLY }
  }
  CORNERS(_tile_stored)
}
// The result, to which it adds, or not. Tiles add one term after another: so few at a time that a sum of many, each of
// several products, is as exact as one by blocks.
template <int P>
static inline void block(const uint16_t* a, const uint16_t* b, i64 num, float* out, i64 step, bool adds) {
  if (P == 1) return sum<P>(a, b, num, out, step, adds);
  if (!adds) sum<P>(a, b, least(num, FEW), out, step, false);
  for (i64 k = adds ? 0 : FEW; k < num; k += FEW) {
    alignas(64) float part[SIDE * SIDE];
    sum<P>(a + k * 2 * P * TILE, b + k * 2 * P * TILE, least(FEW, num - k), part, SIDE, false);
    for (i64 r = 0; r < SIDE; r++)
      for (i64 c = 0; c < SIDE; c++) out[r * step + c] += part[r * SIDE + c];
  }
}
// The same at the border, where fewer rows or columns are the result's.
template <int P>
static void border(const uint16_t* a, const uint16_t* b, i64 num, float* out, i64 step, bool adds, i64 rows,
                   i64 columns) {
  alignas(64) float part[SIDE * SIDE];
  for (i64 r = 0; adds && r < rows; r++) memcpy(part + r * SIDE, out + r * step, columns * sizeof(float));
  block<P>(a, b, num, part, SIDE, adds);
  for (i64 r = 0; r < rows; r++) memcpy(out + r * step, part + r * SIDE, columns * sizeof(float));
}
// A block of the result, which has so many rows and columns of it. more: sums go on; last: they end here.
struct Place { i64 rows, columns, wide; bool more, last; };
template <int P>
static inline void multiply(const uint16_t* a, const uint16_t* b, i64 num, float*, float* out, i64 step,
                            const float* bias, Place place) {
  if (place.rows == SIDE && place.columns == SIDE) block<P>(a, b, num, out, step, place.more);
  else border<P>(a, b, num, out, step, place.more, place.rows, place.columns);
  if (bias && place.last)
    for (i64 r = 0; r < place.rows; r++)
      for (i64 c = 0; c < place.columns; c++) out[r * step + c] += bias[c];
}
// As bfloat16, to nearest: a number in the lower half of 32 bits.
static inline __m512i rounded(__m512 x) {
  const __m512i u = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i near = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
  return _mm512_srli_epi32(_mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet), 16);
}
static inline __m512 widened(__mmask16 mask, const bf16* x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16));
}
// A line of memory at a time. sums: where those go on that do not end here, or null, with place.wide to a row.
template <int P>
static inline void multiply(const uint16_t* a, const uint16_t* b, i64 num, float* sums, bf16* out, i64 step,
                            const bf16* bias, Place place) {
  alignas(64) float part[SIDE * SIDE];
  const i64 from = sums ? place.wide : SIDE;
  if (!sums) sums = part;
  block<P>(a, b, num, sums, from, place.more);
  if (!place.last) return;
  const __mmask32 mask = left_of(place.columns);
  const __m512 first = bias ? widened(mask, bias) : _mm512_setzero_ps();
  const __m512 second = bias ? widened(mask >> HALF, bias + HALF) : _mm512_setzero_ps();
  for (i64 r = 0; r < place.rows; r++) {
    __m512 x = _mm512_load_ps(sums + r * from), y = _mm512_load_ps(sums + r * from + HALF);
    if (bias) { x = _mm512_add_ps(x, first); y = _mm512_add_ps(y, second); }
    const __m512i line = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(rounded(x))),
                                            _mm512_cvtepi32_epi16(rounded(y)), 1);
    if (place.columns == SIDE) _mm512_storeu_si512(out + r * step, line);
    else _mm512_mask_storeu_epi16(out + r * step, mask, line);
  }
}
$TILE_STATE
static int scan(const Operand<bf16>&, int) { return 0; }
static int scan(const Operand<float>& x, int threads) {
  const bool along = x.term_step == 1;
  const i64 lines = along ? x.count : x.terms, length = along ? x.terms : x.count, step = along ? x.step : x.term_step;
  int bad = 0;
  #pragma omp parallel for num_threads(threads) reduction(| : bad)
  for (i64 i = 0; i < lines; i++) {
    __mmask16 found = 0;
    for (i64 j = 0; j < length; j += HALF)
      found |= large(_mm512_maskz_loadu_ps(upto(length - j), x.first + i * step + j));
    bad |= found != 0;
  }
  return bad;
}
template <int P, class T, class U>
static int run(const Operand<T>& left, const Operand<T>& right, const U* bias, U* out, i64 out_step, bool adds,
               const Memory& memory, int threads) {
  const i64 tall = memory.tall, panels = (left.count + tall - 1) / tall, size = 2 * P * TILE, deep = deepest(P);
  int bad = 0;
  #pragma omp parallel num_threads(threads) reduction(| : bad)
  {
    const Tiles tiles;
    const i64 thread = omp_get_thread_num(), count = omp_get_num_threads();
    uint16_t* const own = memory.each + thread * memory.each_size;
    for (i64 column = 0; column < right.count; column += memory.wide)
      for (i64 term = 0; term < left.terms; term += deep) {
        const i64 num = (least(deep, left.terms - term) + STEP - 1) / STEP;
        const i64 wide = (least(memory.wide, right.count - column) + SIDE - 1) / SIDE;
        const bool last = term + deep >= left.terms, more = adds || term > 0;
        const i64 from = wide * thread / count, to = wide * (thread + 1) / count;
        bad |= pack_blocks<P, true>(right, column, from, to, term, num, memory.shared);
        #pragma omp barrier
        #pragma omp for schedule(dynamic)
        for (i64 panel = 0; panel < panels; panel++) {
          const i64 first = panel * tall, blocks = (least(tall, left.count - first) + SIDE - 1) / SIDE;
          bad |= pack_blocks<P, false>(left, first, 0, blocks, term, num, own);
          for (i64 i = 0; i < blocks; i++)
            for (i64 j = 0; j < wide; j++) {
              const i64 row = first + i * SIDE, start = column + j * SIDE;
              const Place place{least(SIDE, left.count - row), least(SIDE, right.count - start), memory.wide,
                                more, last};
              float* const sums = memory.sums ? memory.sums + row * memory.wide + j * SIDE : nullptr;
              multiply<P>(own + i * num * size, memory.shared + j * num * size, num, sums,
                          out + row * out_step + start, out_step, bias ? bias + start : nullptr, place);
            }
        }
      }
  }
  return bad;
}
static int refuses(void) { return !allowed(); }
#else
// On a processor without tiles the same sums, by plain arithmetic: for tests.
template <int P> static inline float piece_of(float x, int piece) {
  uint32_t bits;
  float part = 0;
  for (int i = 0; i <= piece; i++) {
    x -= part;
    memcpy(&bits, &x, 4);
    if (P == 2) bits += 0x7FFFu + (bits >> 16 & 1u);
    bits &= 0xFFFF0000u;
    memcpy(&part, &bits, 4);
  }
  return part;
}
static int scan(const Operand<bf16>&, int) { return 0; }
static int scan(const Operand<float>& x, int) {
  for (i64 i = 0; i < x.count; i++)
    for (i64 k = 0; k < x.terms; k++) {
      uint32_t bits;
      memcpy(&bits, x.first + i * x.step + k * x.term_step, 4);
      if ((bits & 0x7FFFFFFFu) >= 0x7F7F8000u) return 1;
    }
  return 0;
}
template <int P, class T, class U>
static int run(const Operand<T>& left, const Operand<T>& right, const U* bias, U* out, i64 out_step, bool adds,
               const Memory&, int threads) {
  if (scan(left, 1) || scan(right, 1)) return 1;
  #pragma omp parallel for num_threads(threads)
  for (i64 i = 0; i < left.count; i++)
    for (i64 j = 0; j < right.count; j++) {
      float sum = adds ? widen(out[i * out_step + j]) : 0;
      for (i64 start = 0; start < left.terms; start += FEW * STEP) {
        float part = 0;
        for (i64 k = start; k < least(start + FEW * STEP, left.terms); k++) {
          const float x = widen(left.first[i * left.step + k * left.term_step]);
          const float y = widen(right.first[j * right.step + k * right.term_step]);
          float term = 0;
          for (int p = P - 1; p >= 0; p--)
            for (int q = P - 1 - p; q >= 0; q--) term += piece_of<P>(x, p) * piece_of<P>(y, q);
          part += term;
        }
        sum += part;
      }
      store(out + i * out_step + j, bias ? sum + widen(bias[j]) : sum);
    }
  return 0;
}
static int refuses(void) { return 0; }
#endif
template <int P, class T, class U>
static int multiplied(const void* left, const void* right, const void* bias, void* out, const i64* sizes, bool adds,
                      const Memory& memory, int threads) {
  const Operand<T> a{(const T*)left, sizes[0], sizes[1], sizes[3], sizes[4]};
  const Operand<T> b{(const T*)right, sizes[2], sizes[1], sizes[6], sizes[5]};
  if (refuses() || (adds && (scan(a, threads) || scan(b, threads)))) return 1;
  return run<P>(a, b, (const U*)bias, (U*)out, sizes[7], adds, memory, threads);
}
// out (+)= left right + bias, or 1 where an operand of float32 is not finite, or the system gives no tiles: then `out`
// is as it was where it adds, and else anything. sizes: rows, terms, columns, the steps of the left operand's rows and
// terms, of the right one's terms and columns, of out's rows. narrow: the result is bfloat16, to which nothing is
// added. shared and what follows it: those of Memory.
extern "C" int product(const void* left, const void* right, const void* bias, void* out, const i64* sizes,
                       int narrow, int adds, uint16_t* shared, uint16_t* each, i64 each_size, i64 tall, i64 wide,
                       float* sums, int threads) {
  $FUNCTION
  return function(left, right, bias, out, sizes, adds, {shared, each, each_size, tall, wide, sums}, threads);
}
""")


def tiles_source(pieces: int) -> str:
    """`product`, for operands of float32 in so many pieces, or of bfloat16, which are one: apart, for a program seldom
    needs more than one of them."""
    function = "const auto function = narrow ? multiplied<1, bf16, bf16> : multiplied<1, bf16, float>;"
    if pieces > 1:
        function = f"const auto function = multiplied<{pieces}, float, float>;"
    sizes = {"SIDE": SIDE, "STEP": STEP, "DEEP": DEEP, "DEEPER": DEEPER, "FEW": FEW}
    return (
        INTEGERS
        + FLOATS
        + _TEXT.substitute(sizes, ALLOWED=ALLOWED, TILE_STATE=TILE_STATE, TRANSPOSE=TRANSPOSE, FUNCTION=function)
    )
