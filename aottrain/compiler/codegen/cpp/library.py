"""The C++ functions that generated kernels call: self-contained, so that a program compiles in a second.

Each is written so that a compiler vectorises a loop around it: no branches, no tables. Polynomials are least-squares
fits, weighted towards the largest error (Lawson's method), made for this file; arguments are reduced as Cody and Waite
do (Software Manual for the Elementary Functions, 1980). tests/numerics bound the errors.
"""

from aottrain.compiler.codegen.cpp.circular import turns_table
from aottrain.ops.native.philox import PHILOX_ELEMENT, PHILOX_NORMALS, PHILOX_ROWS
from aottrain.ops.native.shared import with_parts

_TYPES = with_parts("""\
$INTEGERS
struct f16 { u16 bits; };
$BFLOAT16
$INLINE
extern "C" {
int omp_get_thread_num(void); int omp_get_num_threads(void); int omp_get_max_threads(void);
double exp(double); double expm1(double); double log(double); double log1p(double); double sin(double);
double cos(double); double tanh(double); double erf(double); double erfc(double); double pow(double, double);
double tan(double); double atan(double); double atan2(double, double); double exp2(double); double log2(double);
double log10(double); float powf(float, float); float sinf(float); float cosf(float); float tanf(float);
float atanf(float); float atan2f(float, float); float erfcf(float);
double asin(double); double acos(double); double sinh(double); double cosh(double); double fmod(double, double);
float asinf(float); float acosf(float); float sinhf(float); float coshf(float); float fmodf(float, float);
float log10f(float); float log2f(float); float exp2f(float);
}
$FMA
// The same address, of which a compiler does not know that it is.
template <class T> INLINE T* apart_(T* p) { asm("" : "+r"(p)); return p; }
INLINE double fma_(double a, double b, double c) { return __builtin_fma(a, b, c); }
""")

_FUNCTIONS = with_parts("""\
$BITS
// a where `first` is 1, b where it is 0, by their bits: a choice would become one whether to read a at all, and then
// no vector.
template <class T> INLINE T blend_(i32 first, T a, T b) { return (T)((a & (T)-(T)first) | (b & (T)((T)first - 1))); }
INLINE bool blend_(i32 first, bool a, bool b) { return first ? a : b; }
INLINE float blend_(i32 first, float a, float b) {
  return bits_<float>(blend_(first, bits_<i32>(a), bits_<i32>(b)));
}
INLINE double blend_(i32 first, double a, double b) {
  return bits_<double>(blend_(first, bits_<i64>(a), bits_<i64>(b)));
}
// A NaN and what is too large, which C++ leaves open, as the processor has them; g++ makes other numbers of those that
// it knows while it compiles.
template <class To, class From> INLINE To whole_(From x) {
#if defined(__x86_64__)
  const To lowest = (To)((u64)1 << (8 * sizeof(To) - 1));
  return (x >= (From)lowest) & (x < -(From)lowest) ? (To)x : lowest;
#else
  return (To)x;
#endif
}
$WIDEN
INLINE double widen(double x) { return x; }
// By whole numbers of 32 bits: g++ 12 makes no vectors of its own type's conversions, nor of comparisons of 16 bits
// that choose a float. Below the smallest normal number are multiples of 2^-24.
INLINE float widen(f16 x) {
  const u32 size = (u32)(x.bits & 0x7fffu) << 13, sign = (u32)(x.bits & 0x8000u) << 16;
  const u32 normal = size + (size < 0x0f800000u ? 0x38000000u : 0x70000000u);
  const u32 small = bits_<u32>((float)(i32)size * 7.275957614183426e-12f);
  return bits_<float>((size < 0x00800000u ? small : normal) | sign);
}
// To nearest, ties to even; a NaN stays one. 0.5 and its sums with smaller numbers are multiples of 2^-24.
INLINE float round_f16(float x) {
  const u32 u = bits_<u32>(x), sign = u & 0x80000000u, size = u ^ sign;
  const u32 small = bits_<u32>((bits_<float>(size) + 0.5f) - 0.5f);
  const u32 normal = (size + 0xfffu + ((size >> 13) & 1u)) & 0xffffe000u;
  const u32 large = size > 0x7f800000u ? 0x7fc00000u : 0x7f800000u;
  return bits_<float>((size < 0x38800000u ? small : size < 0x477ff000u ? normal : large) | sign);
}
// Of a number that is one already.
INLINE f16 upper_f16(float x) {
  const u32 u = bits_<u32>(x), sign = u & 0x80000000u, size = u ^ sign;
  const u32 small = bits_<u32>(bits_<float>(size) + 0.5f) - 0x3f000000u;
  const u32 normal = (size - (size < 0x7f800000u ? 0x38000000u : 0x70000000u)) >> 13;
  return f16{(u16)((size < 0x38800000u ? small : normal) | (sign >> 16))};
}
INLINE f16 to_f16(float x) { return upper_f16(round_f16(x)); }
$CONVERT_BFLOAT16
// Of a number that is one already.
INLINE bf16 upper_bf16(float x) { return bf16{(u16)(bits_<u32>(x) >> 16)}; }
INLINE float round_bf16(float x) { return widen(to_bf16(x)); }
INLINE float max_(float a, float b) { return ((a > b) | (a != a)) ? a : b; }
INLINE float min_(float a, float b) { return ((a < b) | (a != a)) ? a : b; }
INLINE double max_(double a, double b) { return ((a > b) | (a != a)) ? a : b; }
INLINE double min_(double a, double b) { return ((a < b) | (a != a)) ? a : b; }
INLINE i64 max_(i64 a, i64 b) { return a > b ? a : b; }
INLINE i64 min_(i64 a, i64 b) { return a < b ? a : b; }
INLINE i32 max_(i32 a, i32 b) { return a > b ? a : b; }
INLINE i32 min_(i32 a, i32 b) { return a < b ? a : b; }
// Sums over rows that are long: a part begins, one of fewer rows is added to it, and those of all threads, `step` bytes
// apart, are added up. `out` may be the first of them. Compiled once for all sums of a text.
#define SHARED static __attribute__((noinline))
template <class T> SHARED void start_columns(T* p, i64 n) { for (i64 j = 0; j < n; j++) p[j] = 0; }
template <class T> SHARED void add_columns(T* __restrict p, const T* __restrict q, i64 n) {
  for (i64 j = 0; j < n; j++) p[j] += q[j];
}
template <class T> SHARED void sum_columns(T* out, const char* parts, i64 step, i64 threads, i64 begin, i64 end) {
  for (i64 j = begin; j < end; j++) out[j] = ((const T*)parts)[j];
  for (i64 t = 1; t < threads; t++) add_columns(out + begin, (const T*)(parts + t * step) + begin, end - begin);
}
// x below a positive bound and above a negative one, but not a NaN. Compared as integers: of comparisons of floats
// g++ makes several blends.
INLINE float at_most_(float x, float high) {
  const i32 most = bits_<i32>(high), c = bits_<i32>(x);
  return bits_<float>(c > most ? most : c);
}
INLINE float clamp_(float x, float low, float high) {
  const u32 least = bits_<u32>(low), c = bits_<u32>(at_most_(x, high));
  return bits_<float>(c > least ? least : c);
}
// Added to a number up to 2^22, it leaves the nearest integer in the last bits.
#define NEAREST 12582912.0f
// e^r, |r| <= log(2) / 2, and 2^r, |r| <= 1 / 2.
INLINE float near_exp_(float r) {
$EXP_SERIES
  p = fma_(p, r, 1.0f); return fma_(p, r, 1.0f);
}
INLINE float near_exp2_(float r) {
  float p = fma_(0.0001532646f, r, 0.0013390806f);
  p = fma_(p, r, 0.0096185058f); p = fma_(p, r, 0.0555035993f); p = fma_(p, r, 0.2402264774f);
  p = fma_(p, r, 0.6931471825f); return fma_(p, r, 1.0f);
}
// exp: x = n log 2 + r; scaled by 2^n in two factors, so that results near the ends of the range come out right.
INLINE float exp_(float x) {
  const float c = clamp_(x, -104.0f, 89.0f);
  const float t = fma_(c, $LOG2_E, NEAREST), n = t - NEAREST;
  const float y = near_exp_(fma_(n, -$LOG_2_REST, fma_(n, -$LOG_2, c)));
  const u32 k = bits_<u32>(t), half = (k >> 1) << 23;
  const float out = bits_<float>(bits_<u32>(y) + half) * bits_<float>((k << 23) - half + 0x3f800000u);
  return x != x ? x : out;
}
$LOG
// exp(r) - 1 is kept apart from 1, so that it loses nothing near zero; 2^n - 1 is exact where it matters.
INLINE float expm1_(float x) {
  const float c = x > 40.0f ? 40.0f : (x < -40.0f ? -40.0f : x);
  const float n = __builtin_rintf(c * $LOG2_E);
  float r = fma_(n, -$LOG_2, c);
  r = fma_(n, -$LOG_2_REST, r);
$EXP_SERIES
  const float scale = bits_<float>(((i32)n + 127) << 23);
  const float y = fma_(scale, fma_(r * r, p, r), scale - 1.0f);
  return (x == 0.0f) | (x != x) ? x : (x > 40.0f ? exp_(x) : y);
}
// log(u) of the rounded u = 1 + x, and what rounding has left of x.
INLINE float log1p_(float x) {
  const float u = 1.0f + x, rest = x - (u - 1.0f);
  const bool usual = (u > 0.0f) & (u < __builtin_inff());
  return x == 0.0f ? x : log_(u) + (usual ? rest / u : 0.0f);
}
// 2^c, |c| <= 300, in float64: off by less than 1e-9 of it, which a float does not show.
INLINE double wide_exp2_(double c) {
  const double nearest = 6755399441055744.0;  // leaves a whole number in the last bits
  const double t = c + nearest, r = (c - (t - nearest)) * 0.6931471805599453;
  double p = fma_(1.0 / 362880, r, 1.0 / 40320);
  p = fma_(p, r, 1.0 / 5040); p = fma_(p, r, 1.0 / 720); p = fma_(p, r, 1.0 / 120); p = fma_(p, r, 1.0 / 24);
  p = fma_(p, r, 1.0 / 6); p = fma_(p, r, 0.5); p = fma_(p, r, 1.0); p = fma_(p, r, 1.0);
  return bits_<double>(bits_<u64>(p) + (bits_<u64>(t) << 52));
}
// log2(x) of a float x > 0, in float64: of a significand f between sqrt(1/2) and sqrt(2) twice the inverse hyperbolic
// tangent of z.
INLINE double wide_log2_(double x) {
  const u64 b = bits_<u64>(x), e = (b + 0x00095f619980c433u) >> 52;
  const double f = bits_<double>(b - (e << 52) + 0x3ff0000000000000u);
  const double whole = bits_<double>(e | 0x4330000000000000u) - 4503599627371519.0;
  const double z = (f - 1.0) / (f + 1.0), w = z * z;
  double p = fma_(1.0 / 13, w, 1.0 / 11);
  p = fma_(p, w, 1.0 / 9); p = fma_(p, w, 1.0 / 7); p = fma_(p, w, 1.0 / 5); p = fma_(p, w, 1.0 / 3);
  return fma_(2.8853900817779268 * z, fma_(p, w, 1.0), whole);
}
// x^y of a float x, to the last bits of a float; y in float64, as eager has it where it is a number of the program.
// What is asked of x is asked of its bits, and y is a sum: g++ would compare the floats that they were, and makes no
// vectors of choices between numbers of another width. Nor does it by what is the same for all elements, as y may be:
// so answers about y are numbers, not conditions.
INLINE double power_(double x, double exponent) {
  const double inf = __builtin_inf(), nan = __builtin_nan(""), y = exponent + 0.0, half = 0.5 * y;
  const i64 bits = bits_<i64>(x), size = bits & 0x7fffffffffffffff, infinite = 0x7ff0000000000000;
  const i64 one = 0x3ff0000000000000;
  const double a = bits_<double>(size), c = size == one ? 0.0 : y * wide_log2_(a);
  const double near = wide_exp2_(c > 300.0 ? 300.0 : (c < -300.0 ? -300.0 : c));
  const bool whole = __builtin_rint(y) == y;
  const double of_zero = y < 0.0 ? inf : 0.0, of_infinity = y < 0.0 ? 0.0 : inf, unit = y != y ? nan : 1.0;
  const double of_negative = whole ? 0.0 : nan;
  const i64 odd = whole & (__builtin_rint(half) != half) ? (i64)-1 : 0, all = y == 0.0 ? (i64)-1 : 0;
  const double usual = bits < 0 ? near + of_negative : near;
  const double out = (size == 0 ? of_zero : (size == infinite ? of_infinity : (size > infinite ? nan : usual))) * unit;
  const i64 with_sign = bits_<i64>(out) ^ ((bits ^ size) & odd);
  return bits_<double>(bits == one ? one : (with_sign & ~all) | (one & all));
}
INLINE float pow_(float x, float y) { return (float)power_(x, y); }
INLINE float exp2_(float x) {
  const float out = (float)wide_exp2_(x > 300.0f ? 300.0 : (x < -300.0f ? -300.0 : (double)x));
  return x != x ? x : out;
}
INLINE float logarithm_(float x, double unit) {
  const float y = (float)(wide_log2_(x) * unit), inf = __builtin_inff();
  return x == 0.0f ? -inf : (x < 0.0f ? __builtin_nanf("") : (x < inf ? y : x));
}
INLINE float log2_(float x) { return logarithm_(x, 1.0); }
INLINE float log10_(float x) { return logarithm_(x, 0.30102999566398120); }
INLINE float tanh_(float x) {
  const float t = __builtin_fabsf(x), s = x * x;
  float p = fma_(-0.0058979667f, s, 0.0207986254f);
  p = fma_(p, s, -0.0537847169f); p = fma_(p, s, 0.1333193630f); p = fma_(p, s, -0.3333329856f);
  const float small = fma_(x * s, p, x);
  const float c = at_most_(t, 10.0f);
  const float u = fma_(c, 2.88539008f, NEAREST);
  const float y = near_exp2_(fma_(c, 2.88539008f, NEAREST - u));
  const float large = 1.0f - 2.0f / (bits_<float>(bits_<u32>(y) + (bits_<u32>(u) << 23)) + 1.0f);
  return __builtin_copysignf(t >= 0.6f ? large : small, x);
}
// 1 - 2^Q(t) where log2(erfc(t)) = Q(t), a series in t near zero.
INLINE float erf_(float x) {
  const float t = __builtin_fabsf(x), s = x * x;
  float p = fma_(0.0044356617f, s, -0.0265955050f);
  p = fma_(p, s, 0.1127993017f); p = fma_(p, s, -0.3761244416f); p = fma_(p, s, 0.1283791512f);
  const float small = fma_(x, p, x);
  const float c = at_most_(t, 4.0f);
  float q = fma_(0.0003204852f, c, -0.0047384230f);
  q = fma_(q, c, 0.0333631597f); q = fma_(q, c, -0.1524463296f); q = fma_(q, c, -0.9166102409f);
  q = fma_(q, c, -1.6283489466f); q = fma_(q, c, 4.3620035e-5f);
  const float u = q + NEAREST, y = near_exp2_(q - (u - NEAREST));
  const float large = 1.0f - bits_<float>(bits_<u32>(y) + (bits_<u32>(u) << 23));
  return t >= 0.6f ? __builtin_copysignf(large, x) : small;
}
$QUADRANT
INLINE float near_(float x, int quarter) {
  const float n = __builtin_rintf(x * 0.636619772f);
  float r = fma_(n, -1.57079601f, x);
  r = fma_(n, -3.13916473e-7f, r);
  r = fma_(n, -5.39030253e-15f, r);
  return quadrant_(r, (i32)n + quarter);
}
INLINE float far_(float x, int quarter) {
  const i32 e = (i32)((bits_<u32>(x) >> 23) & 255u) - 150, k = e < 0 ? 0 : (e > 105 ? 105 : e);
  const double m = (double)(x * bits_<float>((u32)(127 - k) << 23)), turns = m * TURNS[2 * k];
  const double n = __builtin_rint(turns);
  const float r = (float)(((turns - n) + m * TURNS[2 * k + 1]) * 1.5707963267948966);
  return quadrant_(r, (i32)n + quarter);
}
INLINE float sin_(float x) { return x == 0.0f ? x : near_(x, 0); }
INLINE float cos_(float x) { return near_(x, 1); }
INLINE float far_sin_(float x) { return x == 0.0f ? x : far_(x, 0); }
INLINE float far_cos_(float x) { return far_(x, 1); }
// 1 / (1 + e^-x), with e^-x as twice a number that does not overflow before it does.
INLINE float sigmoid_(float x) {
  const float c = clamp_(x, -89.0f, 87.0f);
  const float t = fma_(c, -$LOG2_E, NEAREST), n = t - NEAREST;
  const float y = near_exp_(fma_(n, -$LOG_2_REST, fma_(n, -$LOG_2, -c)));
  const float out = 1.0f / fma_(y * bits_<float>((bits_<u32>(t) << 23) + 0x3f000000u), 2.0f, 1.0f);
  return x != x ? x : out;
}
INLINE double sigmoid_(double x) { return 1.0 / (1.0 + exp(-x)); }
INLINE float sign_(float x) { return (float)((x > 0.0f) - (x < 0.0f)); }
INLINE double sign_(double x) { return (double)((x > 0.0) - (x < 0.0)); }
INLINE i64 sign_(i64 x) { return (x > 0) - (x < 0); }
""")

LIBRARY = _TYPES + turns_table() + _FUNCTIONS + PHILOX_ELEMENT + PHILOX_ROWS + PHILOX_NORMALS
