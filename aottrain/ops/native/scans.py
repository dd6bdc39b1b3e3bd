"""The C++ of `ops.scans`: running sums, and logarithms of running sums of exponentials, of neighbours side by side.

A running sum is kept in float64, as ATen keeps it. A sum of exponentials is kept as its largest term and the sum of all
divided by that, so a step takes one exponential and the logarithm is no part of what is carried on. Both series are
truncated Taylor series, off by less than 1e-9: the result is rounded to float32 once.
"""

from aottrain.ops.native.shared import with_parts

# Neighbours whose sums are carried along together: a few vectors, in the first cache.
LANES = 64

SCANS = (
    with_parts("$INTEGERS\n$INLINE\n$BITS\n")
    + f"constexpr i64 LANES = {LANES};\n"
    + """\
// e^x, x <= 0; what is below the smallest normal number is about that. A NaN is taken for such.
INLINE double exp_(double x) {
  const double c = x > -708.0 ? x : -708.0, nearest = 6755399441055744.0;  // leaves a whole number in the last bits
  const double t = c * 1.4426950408889634 + nearest, n = t - nearest, r = c - n * 0.6931471805599453;
  double p = r * (1.0 / 40320) + 1.0 / 5040;
  p = p * r + 1.0 / 720; p = p * r + 1.0 / 120; p = p * r + 1.0 / 24; p = p * r + 1.0 / 6;
  p = p * r + 0.5; p = p * r + 1.0; p = p * r + 1.0;
  return bits_<double>(bits_<u64>(p) + (bits_<u64>(t) << 52));
}
// log(x), x >= 1: of a significand f between sqrt(1/2) and sqrt(2) twice the inverse hyperbolic tangent of z.
INLINE double log_(double x) {
  const u64 e = (bits_<u64>(x) - 0x3fe6a09e667f3bcdu) >> 52;
  const double f = bits_<double>(bits_<u64>(x) - (e << 52));
  const double whole = bits_<double>(e | 0x4330000000000000u) - 4503599627370496.0;
  const double z = (f - 1.0) / (f + 1.0), w = z * z;
  double p = w * (1.0 / 13) + 1.0 / 11;
  p = p * w + 1.0 / 9; p = p * w + 1.0 / 7; p = p * w + 1.0 / 5; p = p * w + 1.0 / 3; p = p * w + 1.0;
  return whole * 0.6931471805599453 + 2.0 * z * p;
}
struct Sum {
  double total[LANES];
  INLINE void begin(Sum& s) { for (i64 j = 0; j < LANES; j++) s.total[j] = 0.0; }
  INLINE double step(Sum& s, i64 j, double x) { return s.total[j] += x; }
};
struct LogSum {
  double most[LANES], rest[LANES];
  INLINE void begin(LogSum& s) {
    for (i64 j = 0; j < LANES; j++) s.most[j] = -__builtin_inf(), s.rest[j] = 0.0;
  }
  INLINE double step(LogSum& s, i64 j, double x) {
    const double most = s.most[j], rest = s.rest[j];
    // Equal ones may be infinite: their difference would be a NaN.
    const double scale = exp_(x == most ? 0.0 : (x > most ? most - x : x - most));
    const double total = x > most ? rest * scale + 1.0 : rest + scale;
    const double greater = x > most || x != x ? x : most;  // a NaN stays
    s.most[j] = greater, s.rest[j] = total;
    return greater + log_(total);
  }
};
// Steps lie `along` elements apart. A block is some neighbours, or the same step of some rows, `across` apart.
template <class State> INLINE void scan_block(const float* x, float* y, i64 steps, i64 along, i64 count, i64 across) {
  State state;
  State::begin(state);
  for (i64 t = 0; t < steps; t++) {
    const float* __restrict from = x + t * along;
    float* __restrict to = y + t * along;
    #pragma omp simd
    for (i64 j = 0; j < count; j++) to[j * across] = (float)State::step(state, j, (double)from[j * across]);
  }
}
template <class State> INLINE void scan(const float* x, float* y, i64 outer, i64 steps, i64 inner, int threads) {
  const bool rows = inner == 1;
  const i64 lanes = rows ? outer : inner, blocks = (lanes + LANES - 1) / LANES;
  #pragma omp parallel for schedule(static) num_threads(threads)
  for (i64 k = 0; k < (rows ? 1 : outer) * blocks; k++) {
    const i64 first = k % blocks * LANES, count = lanes - first < LANES ? lanes - first : LANES;
    const i64 start = rows ? first * steps : k / blocks * steps * inner + first;
    if (rows) scan_block<State>(x + start, y + start, steps, 1, count, steps);
    else scan_block<State>(x + start, y + start, steps, inner, count, 1);
  }
}
extern "C" void cumsum(const float* x, float* y, i64 outer, i64 steps, i64 inner, int threads) {
  scan<Sum>(x, y, outer, steps, inner, threads);
}
extern "C" void logcumsumexp(const float* x, float* y, i64 outer, i64 steps, i64 inner, int threads) {
  scan<LogSum>(x, y, outer, steps, inner, threads);
}
"""
)
