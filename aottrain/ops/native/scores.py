"""The C++ of what `ops.attention` does to scores beside their softmax: masks, and the draws of a dropout."""

from string import Template

from aottrain.ops.native.philox import PHILOX_ROWS

# What a mask does to scores: it adds float32 numbers, or those of the heads' type, or says which are filled.
MASK_KINDS = ("NONE", "ADDS_FLOAT", "ADDS", "FILLS")

RULE = Template("""\
// What becomes of scores before and after their softmax. mask: what it adds to them, float or T; or bytes that say
// which of them are `fill` instead. strides: the mask's, of batch, head, query and key. safe: a query that sees no key
// gives zeros, not NaN. Of a draw at `position` the elements below `keep` keep their probability, times `factor`.
// split: of a row's sum of exponentials its largest score and the logarithm of the rest are kept: of scores of -1e9 the
// sum of both would not tell how many there are.
enum { $MASK_KINDS };
struct Rule {
  int64_t causal, kind, safe, split, drops;
  u64 seed, position;
  int64_t strides[4];
};
struct Numbers { float scale, fill, keep, factor; };
""").substitute(MASK_KINDS=", ".join(MASK_KINDS))

_SCORES = """\
// What is called once a row or a block stays a function: compiled once, not wherever it is called.
struct Scores {
  const Rule& rule; const Numbers& numbers; const void* mask; int64_t first, keys;
  bool masked() const { return !PLAIN && rule.kind != NONE; }
  bool filled() const { return !PLAIN && rule.kind == FILLS; }
  bool drops() const { return !PLAIN && rule.drops; }
  template <class E> const E* row(int64_t query, int64_t start) const {
    return (const E*)mask + query * rule.strides[2] + start * rule.strides[3];
  }
  // Whether none of these queries sees any of these keys.
  template <class E, class F> bool all(int64_t query, int64_t count, int64_t start, int64_t num_keys, F is) const {
    for (int64_t i = query; i < query + count; i++) {
      const E* x = row<E>(i, start);
      for (int64_t j = 0; j < num_keys; j++)
        if (!is(x[j * rule.strides[3]])) return false;
    }
    return true;
  }
  __attribute__((noinline)) bool hide(int64_t query, int64_t count, int64_t start, int64_t num_keys) const {
    const auto adds = [](auto x) { return widen(x) == -__builtin_inff(); };
    if (rule.kind == ADDS_FLOAT) return all<float>(query, count, start, num_keys, adds);
    if (rule.kind == ADDS) return all<T>(query, count, start, num_keys, adds);
    const auto fills = [](uint8_t x) { return x != 0; };
    const bool hides = rule.kind == FILLS && numbers.fill == -__builtin_inff();
    return hides && all<uint8_t>(query, count, start, num_keys, fills);
  }
  // out[j] = what `f` makes of it and the mask, for `count` keys from `start` on.
  template <class E, class F> void each(int64_t query, int64_t start, int64_t count, float* out, F f) const {
    const E* x = row<E>(query, start);
    const int64_t step = rule.strides[3];
    if (step == 1)
      for (int64_t j = 0; j < count; j++) out[j] = f(out[j], x[j]);
    else
      for (int64_t j = 0; j < count; j++) out[j] = f(out[j], x[j * step]);
  }
  // A query's products to scores, where there is a mask.
  __attribute__((noinline)) void apply(int64_t query, int64_t start, int64_t count, float* out) const {
    const float scale = numbers.scale, fill = numbers.fill;
    const auto adds = [=](float score, auto x) { return score * scale + widen(x); };
    if (rule.kind == ADDS_FLOAT) each<float>(query, start, count, out, adds);
    if (rule.kind == ADDS) each<T>(query, start, count, out, adds);
    const auto fills = [=](float score, uint8_t x) { return x ? fill : score * scale; };
    if (rule.kind == FILLS) each<uint8_t>(query, start, count, out, fills);
  }
  // Zeros in the gradients of scores that were filled.
  __attribute__((noinline)) void erase(int64_t query, int64_t start, int64_t count, float* out) const {
    each<uint8_t>(query, start, count, out, [](float score, uint8_t x) { return x ? 0.0f : score; });
  }
  // What each probability is multiplied by.
  __attribute__((noinline)) void draw(int64_t query, int64_t start, int64_t count, float* out) const {
    philox_row(rule.seed, rule.position, (u64)(first + query * keys + start), count, out);
    for (int64_t j = 0; j < count; j++) out[j] = out[j] < numbers.keep ? numbers.factor : 0.0f;
  }
};
"""


def scores_source(plain: bool) -> str:
    """`Scores`, for heads of a type T. plain: for attentions that have neither a mask nor dropout, which compile
    sooner."""
    return f"constexpr bool PLAIN = {int(plain)};\n" + PHILOX_ROWS + RULE + _SCORES
