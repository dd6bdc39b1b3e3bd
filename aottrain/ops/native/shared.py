"""What several C++ texts have in common, each part written once; a text names a part as $PART.

The exponential's argument is c = n log 2 + r, n whole, reduced as Cody and Waite do (Software Manual for the Elementary
Functions, 1980); e^r is a series, fitted as those of `codegen.cpp.library`. How e^r and 2^n are put together differs
from text to text: with what comes near the ends of the range.
"""

from string import Template

PARTS = {
    "INTEGERS": """\
typedef __INT8_TYPE__ i8; typedef __UINT8_TYPE__ u8; typedef __INT16_TYPE__ i16; typedef __UINT16_TYPE__ u16;
typedef __INT32_TYPE__ i32; typedef __UINT32_TYPE__ u32; typedef __INT64_TYPE__ i64; typedef __UINT64_TYPE__ u64;""",
    "INLINE": "#define INLINE static inline __attribute__((always_inline))",
    "BITS": "template <class To, class From> INLINE To bits_(From x) { return __builtin_bit_cast(To, x); }",
    "BFLOAT16": "struct bf16 { u16 bits; };",
    "WIDEN": "INLINE float widen(float x) { return x; }",
    "CONVERT_BFLOAT16": """\
INLINE float widen(bf16 x) { return bits_<float>((u32)x.bits << 16); }
// Round to nearest, ties to even; a NaN stays one.
INLINE bf16 to_bf16(float x) {
  const u32 u = bits_<u32>(x);
  const u32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return bf16{(u16)(x != x ? 0x7fc0u : rounded)};
}""",
    "FMA": """\
#ifdef __FMA__
INLINE float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
INLINE float fma_(float a, float b, float c) { return (float)((double)a * b + c); }
#endif""",
    "LOG2_E": "1.44269504f",
    "LOG_2": "0.693145752f",  # of so few bits that a whole number times it is exact
    "LOG_2_REST": "1.42860677e-6f",
    # (e^r - 1 - r) / r^2, |r| <= log(2) / 2.
    "EXP_SERIES": """\
  auto p = fma_(0.0013813141f, r, 0.0083694197f);
  p = fma_(p, r, 0.0416684560f); p = fma_(p, r, 0.1666651517f); p = fma_(p, r, 0.4999999404f);""",
    # log(x) = k log 2 + log(1 + f): a series in f, beside f itself.
    "LOG": """\
INLINE float log_(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const u32 u = bits_<u32>(tiny ? x * 8388608.0f : x);
  // The exponent that leaves a significand between sqrt(1/2) and sqrt(2).
  const i32 e = (i32)(u - 0x3f3504f3u) >> 23;
  const float f = bits_<float>(u - ((u32)e << 23)) - 1.0f;
  const float k = (float)(e - (tiny ? 23 : 0));
  float p = fma_(0.0672965422f, f, -0.1149794385f);
  p = fma_(p, f, 0.1179439276f); p = fma_(p, f, -0.1243143156f); p = fma_(p, f, 0.1423750371f);
  p = fma_(p, f, -0.1666700840f); p = fma_(p, f, 0.2000104785f); p = fma_(p, f, -0.2500001490f);
  p = fma_(p, f, 0.3333333135f);
  const float s = f * f;
  const float tail = fma_(k, $LOG_2_REST, fma_(s * f, p, -0.5f * s));
  const float y = fma_(k, $LOG_2, f + tail);
  const float inf = __builtin_inff();
  return x == 0.0f ? -inf : (x < 0.0f ? __builtin_nanf("") : (x < inf ? y : x));
}""",
    "QUADRANT": """\
// Sine (quarter 0) or cosine (1) of r + k * pi / 2, |r| <= pi / 4.
INLINE float quadrant_(float r, i32 k) {
  const float s = r * r;
  float a = fma_(2.71736644e-6f, s, -0.0001983923f);
  a = fma_(a, s, 0.0083333291f); a = fma_(a, s, -0.1666666717f);
  const float sine = fma_(r * s, a, r);
  float b = fma_(-2.69566982e-7f, s, 2.47973694e-5f);
  b = fma_(b, s, -0.0013888882f); b = fma_(b, s, 0.0416666679f);
  const float cosine = fma_(s * s, b, fma_(-0.5f, s, 1.0f));
  const float y = (k & 1) ? cosine : sine;
  return (k & 2) ? -y : y;
}""",
}


def with_parts(text: str) -> str:
    """The text with each part where it names it."""
    return Template(Template(text).safe_substitute(PARTS)).substitute(PARTS)  # some name others


# What texts written by hand begin with: integers by their widths, and float and bfloat16 under the same names.
INTEGERS = with_parts("$INTEGERS\n$INLINE\n")
FLOATS = with_parts("""\
$BFLOAT16
$BITS
$WIDEN
$CONVERT_BFLOAT16
INLINE void store(float* p, float x) { *p = x; }
INLINE void store(bf16* p, float x) { *p = to_bf16(x); }
INLINE float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE float rint_(float x) { return __builtin_rintf(x); }
// e^c / 2^n, and n. Of F, a float or some of them, there are fma_ and rint_.
template <class F> INLINE F reduced_exp_(F c, F& n) {
  n = rint_(c * $LOG2_E);
  const F r = fma_(n, -$LOG_2_REST, fma_(n, -$LOG_2, c));
$EXP_SERIES
  return 1.0f + fma_(r * r, p, r);
}
""")
