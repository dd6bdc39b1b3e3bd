"""The C++ of `ops.attention`: softmax(q k^T * scale) v of one head at a time, and its gradients.

Dao et al., "FlashAttention", 2022: scores are never whole in memory. A block of queries meets a block of keys; the sum
of exponentials is corrected where a later block has a larger score. The backward computes the probabilities again from
the scores and what the forward kept of each row, the logarithm of its sum of exponentials. All arithmetic is in
float32, whatever is stored: a head is widened once, into memory that stays in the cache. Under a causal mask nothing is
computed above the diagonal but what shares a block with it.
"""

from string import Template

from aottrain.ir.kernels.attention import BACKWARD_MEMORY, BLOCKS, FORWARD_MEMORY, PADDED
from aottrain.ops.native.heads import HEADS, divided, workspace
from aottrain.ops.native.scores import scores_source
from aottrain.ops.native.shared import FLOATS, INTEGERS


def _constants(blocks: dict[str, int]) -> str:
    return f"constexpr int64_t {', '.join(f'{name} = {size}' for name, size in blocks.items())};"


# A tile is R rows by at most two vectors.
_TYPES = f"""\
#define UNROLL _Pragma("GCC unroll 8")
#ifdef __AVX512F__
{_constants(BLOCKS["__AVX512F__"])}
#else
{_constants(BLOCKS[""])}
#endif
static_assert(KEYS == 2 * LANES && FORWARD_KEYS % KEYS == 0 && QUERIES % R == 0 && FORWARD_QUERIES % R == 0);
typedef float vec __attribute__((vector_size(LANES * sizeof(float))));
"""

_SHARED = """\
INLINE vec load(const float* p) { vec v; memcpy(&v, p, sizeof v); return v; }
INLINE void save(float* p, vec v) { memcpy(p, &v, sizeof v); }
// out[R][C vectors] = factor * the sum over k < n of a[row * a_row + k * a_step] * b[k * b_step + column]; or += it.
template <int C>
static __attribute__((noinline)) void tile(int64_t n, const float* a, int64_t a_row, int64_t a_step, const float* b,
                                           int64_t b_step, float* out, int64_t out_row, bool adds, float factor = 1) {
  vec sum[R][C];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) sum[r][c] = vec{};
  for (int64_t k = 0; k < n; k++) {
    vec right[C];
    UNROLL for (int c = 0; c < C; c++) right[c] = load(b + k * b_step + c * LANES);
    UNROLL for (int r = 0; r < R; r++) {
      const float left = a[r * a_row + k * a_step];
      UNROLL for (int c = 0; c < C; c++) sum[r][c] += left * right[c];
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < C; c++) {
      float* place = out + r * out_row + c * LANES;
      save(place, adds ? load(place) + sum[r][c] : factor * sum[r][c]);
    }
}
// The same for `width` columns, a multiple of LANES.
INLINE void rows(int64_t n, const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, float* out,
                 int64_t width, bool adds) {
  int64_t c = 0;
  for (; c + 2 * LANES <= width; c += 2 * LANES) tile<2>(n, a, a_row, a_step, b + c, b_step, out + c, b_step, adds);
  if (c < width) tile<1>(n, a, a_row, a_step, b + c, b_step, out + c, b_step, adds);
}
// Rows from `from` on, widened, with zeros up to `width` columns and `all` rows.
static void pack(Rows<const T> x, int64_t from, int64_t count, int64_t columns, float* out, int64_t all,
                 int64_t width) {
  for (int64_t i = 0; i < count; i++) {
    for (int64_t d = 0; d < columns; d++) out[i * width + d] = widen(x[from + i][d]);
    for (int64_t d = columns; d < width; d++) out[i * width + d] = 0;
  }
  for (int64_t i = count * width; i < all * width; i++) out[i] = 0;
}
// Blocks of KEYS packed rows, each transposed.
static void transpose(const float* x, int64_t all, int64_t width, float* out) {
  for (int64_t block = 0; block < all; block += KEYS)
    for (int64_t d = 0; d < width; d++)
      for (int64_t i = 0; i < KEYS; i++) out[block * width + d * KEYS + i] = x[(block + i) * width + d];
}
static void unpack(const float* x, int64_t width, int64_t count, int64_t columns, float factor, Rows<T> out,
                   int64_t from) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t d = 0; d < columns; d++) store(out[from + i] + d, x[i * width + d] * factor);
}
// Products of the widened rows of some queries with a block of keys, scaled and rounded: in one operation with what is
// taken off them later, the largest of a row would not leave 0.
INLINE void scores(const float* q, const float* keys, float* out, int64_t count, int64_t width, int64_t out_row,
                   float scale) {
  for (int64_t i = 0; i < count; i += R)
    tile<2>(width, q + i * width, width, 1, keys, KEYS, out + i * out_row, out_row, false, scale);
}
#define BEGIN \\
  READ_SIZES \\
  const auto of = [&](int64_t b, int64_t h) { \\
    const int64_t size = rule.kind == FILLS ? 1 : rule.kind == ADDS ? sizeof(T) : sizeof(float); \\
    const char* place = (const char*)mask + (b * rule.strides[0] + h * rule.strides[1]) * size; \\
    return Scores{rule, *numbers, place, (b * n.heads + h) * n.queries * n.keys, n.keys}; \\
  };
"""

_FORWARD = Template("""\
static void forward_head(Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<T> out, Rows<float> lse,
                         const Sizes& n, const Scores& of, float* memory) {
  const bool causal = of.rule.causal, masked = of.masked();
  const float scale = masked ? 1.0f : of.numbers.scale;
  $MEMORY
  pack(k, 0, n.keys, n.columns, values, all, width);
  transpose(values, all, width, keys);
  pack(v, 0, n.keys, n.columns, values, all, width);
  for (int64_t first = 0; first < n.queries; first += FORWARD_QUERIES) {
    const int64_t count = least(FORWARD_QUERIES, n.queries - first), tall = padded(count, R);
    const int64_t end = causal ? least(first + count, n.keys) : n.keys;
    float most[FORWARD_QUERIES], total[FORWARD_QUERIES];
    pack(q, first, count, n.columns, own, tall, width);
    for (int64_t i = 0; i < tall; i++) { most[i] = -__builtin_inff(); total[i] = 0; }
    bool begun = false;
    for (int64_t start = 0; start < end; start += FORWARD_KEYS) {
      if (masked && of.hide(first, count, start, least(FORWARD_KEYS, end - start))) continue;
      const int64_t num_keys = least(FORWARD_KEYS, padded(end - start, KEYS));
      for (int64_t j = 0; j < num_keys; j += KEYS)
        scores(own, keys + (start + j) * width, p + j, tall, width, FORWARD_KEYS, scale);
      for (int64_t i = 0; i < count; i++) {
        float* row = p + i * FORWARD_KEYS;
        const int limit = (int)(least(num_keys, (causal ? least(end, first + i + 1) : end) - start));
        if (masked) of.apply(first + i, start, limit, row);
        for (int j = limit < 0 ? 0 : limit; j < num_keys; j++) row[j] = -__builtin_inff();
        float m = -__builtin_inff();
        #pragma omp simd reduction(max : m)
        for (int j = 0; j < num_keys; j++) m = row[j] > m ? row[j] : m;
        m = m > most[i] ? m : most[i];
        const float base = m == -__builtin_inff() ? 0.0f : m;
        float part = 0;
        #pragma omp simd reduction(+ : part)
        for (int64_t j = 0; j < num_keys; j++) part += row[j] = exp_(row[j] - base);
        const float kept = begun ? exp_(most[i] - base) : 0.0f;
        total[i] = total[i] * kept + part;
        if (of.drops()) {
          float factors[FORWARD_KEYS];
          of.draw(first + i, start, limit, factors);
          for (int j = 0; j < limit; j++) row[j] *= factors[j];
        }
        most[i] = m;
        if (begun)
          for (int64_t d = 0; d < width; d++) sums[i * width + d] *= kept;
      }
      for (int64_t i = 0; i < tall; i += R)
        rows(num_keys, p + i * FORWARD_KEYS, FORWARD_KEYS, 1, values + start * width, width, sums + i * width, width,
             begun);
      begun = true;
    }
    if (!begun) memset(sums, 0, tall * width * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
      const bool empty = total[i] == 0 && of.rule.safe;
      unpack(sums + i * width, width, 1, n.columns, empty ? 1.0f : 1.0f / total[i], out, first + i);
      const float base = empty ? 0.0f : most[i], rest = empty ? 0.0f : __builtin_logf(total[i]);
      lse[first + i][0] = of.rule.split ? base : base + rest;
      if (of.rule.split) lse[first + i][1] = rest;
    }
  }
}
extern "C" void forward(void* const* p, const void* mask, const int64_t* sizes, const Numbers* numbers, float* memory,
                        int64_t each, int threads) {
  BEGIN
  FORWARD_TENSORS
  #pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
  for (int64_t b = 0; b < n.batch; b++)
    for (int64_t h = 0; h < n.heads; h++) {
      const int64_t own = h / n.group();
      forward_head(q.at(b, h), k.at(b, own), v.at(b, own), out.at(b, h), lse.at(b, h), n, of(b, h),
                   memory + omp_get_thread_num() * each);
    }
}
""").substitute(MEMORY="\n  ".join(divided(FORWARD_MEMORY, PADDED, variables=True)))

_BACKWARD = Template("""\
$WORKSPACE
static void pack_keys(Rows<const T> k, Rows<const T> v, const Sizes& n, const Workspace& w) {
  pack(v, 0, n.keys, n.columns, w.ks, w.all, w.width);
  transpose(w.ks, w.all, w.width, w.values);
  pack(k, 0, n.keys, n.columns, w.ks, w.all, w.width);
  transpose(w.ks, w.all, w.width, w.keys);
  memset(w.dks, 0, w.all * w.width * sizeof(float));
  memset(w.dvs, 0, w.all * w.width * sizeof(float));
}
static void pack_queries(Rows<const T> g, Rows<const T> q, Rows<const T> out, Rows<const float> lse, const Sizes& n,
                         const Workspace& w, bool split) {
  pack(q, 0, n.queries, n.columns, w.qs, w.tall, w.width);
  pack(g, 0, n.queries, n.columns, w.gs, w.tall, w.width);
  memset(w.dqs, 0, w.tall * w.width * sizeof(float));
  for (int64_t i = 0; i < w.tall; i++) {
    float sum = 0;  // in the order and with the rounding of `tile`: of a query with one key both products are equal
    if (i < n.queries)
      for (int64_t d = 0; d < n.columns; d++) sum = fma_(w.gs[i * w.width + d], widen(out[i][d]), sum);
    w.deltas[i] = sum;
    w.logs[i] = i < n.queries ? lse[i][0] : __builtin_inff();  // probabilities of 0
    w.rests[i] = i < n.queries && split ? lse[i][1] : 0.0f;
  }
}
// Whether one of these queries sees no key and has NaN for its probabilities, whose gradients are NaN everywhere.
INLINE bool empty(int64_t first, int64_t count, const Workspace& w, const Rule& rule) {
  if (rule.safe) return false;
  for (int64_t i = first; i < first + count; i++)
    if (w.logs[i] == -__builtin_inff()) return true;
  return false;
}
// The queries from `first` on and the keys from `start` on.
INLINE void backward_block(int64_t first, int64_t start, const Sizes& n, const Workspace& w, const Scores& of) {
  const bool causal = of.rule.causal, masked = of.masked();
  const float scale = masked ? 1.0f : of.numbers.scale;
  const int64_t width = w.width, num_keys = least(KEYS, n.keys - start);
  if (causal && start > first) first += (start - first) / R * R;  // rows that see none of the keys
  const int64_t number = padded(least(QUERIES - first % QUERIES, n.queries - first), R);
  if (number <= 0) return;
  if (masked && !empty(first, least(number, n.queries - first), w, of.rule) &&
      of.hide(first, least(number, n.queries - first), start, num_keys)) return;
  const float *q = w.qs + first * width, *g = w.gs + first * width;
  scores(q, w.keys + start * width, w.p, number, width, KEYS, scale);
  scores(g, w.values + start * width, w.ds, number, width, KEYS, 1.0f);
  for (int64_t i = 0; i < number; i++) {
    const int limit = (int)(causal ? least(num_keys, first + i + 1 - start) : num_keys);
    const float log = w.logs[first + i], rest = w.rests[first + i], delta = w.deltas[first + i];
    float *p = w.p + i * KEYS, *ds = w.ds + i * KEYS;
    if (first + i >= n.queries) {  // of which only zeros are read, but keys may be NaN
      for (int j = 0; j < KEYS; j++) p[j] = ds[j] = 0.0f;
      continue;
    }
    if (masked) of.apply(first + i, start, limit, p);
    #pragma omp simd
    for (int j = 0; j < KEYS; j++) p[j] = j < limit ? exp_(p[j] - log - rest) : 0.0f;
    if (of.drops()) {
      float factors[KEYS];
      of.draw(first + i, start, limit, factors);
      for (int j = 0; j < limit; j++) {
        ds[j] = p[j] * (ds[j] * factors[j] - delta);
        p[j] *= factors[j];
      }
    } else {
      #pragma omp simd
      for (int j = 0; j < KEYS; j++) ds[j] = p[j] * (ds[j] - delta);
    }
    if (of.filled()) of.erase(first + i, start, limit, ds);
    for (int j = limit < 0 ? 0 : limit; j < KEYS; j++) ds[j] = 0.0f;
  }
  for (int64_t j = 0; j < KEYS; j += R) {
    rows(number, w.p + j, 1, KEYS, g, width, w.dvs + (start + j) * width, width, true);
    rows(number, w.ds + j, 1, KEYS, q, width, w.dks + (start + j) * width, width, true);
  }
  for (int64_t i = 0; i < number; i += R)
    rows(KEYS, w.ds + i * KEYS, KEYS, 1, w.ks + start * width, width, w.dqs + (first + i) * width, width, true);
}
extern "C" void backward(void* const* p, const void* mask, const int64_t* sizes, const Numbers* numbers, float* memory,
                         int64_t each, int threads) {
  BEGIN
  BACKWARD_TENSORS
  const float scale = numbers->scale;
  #pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
  for (int64_t b = 0; b < n.batch; b++)
    for (int64_t own = 0; own < n.key_heads; own++) {
      const Workspace w(n, memory + omp_get_thread_num() * each);
      pack_keys(k.at(b, own), v.at(b, own), n, w);
      for (int64_t h = own * n.group(); h < (own + 1) * n.group(); h++) {
        pack_queries(g.at(b, h), q.at(b, h), out.at(b, h), lse.at(b, h), n, w, rule.split);
        for (int64_t start = 0; start < n.keys; start += KEYS)
          for (int64_t first = rule.causal ? start / QUERIES * QUERIES : 0; first < n.queries; first += QUERIES)
            backward_block(first, start, n, w, of(b, h));
        unpack(w.dqs, w.width, n.queries, n.columns, scale, dq.at(b, h), 0);
      }
      unpack(w.dks, w.width, n.keys, n.columns, scale, dk.at(b, own), 0);
      unpack(w.dvs, w.width, n.keys, n.columns, 1.0f, dv.at(b, own), 0);
    }
}
""").substitute(WORKSPACE=workspace(BACKWARD_MEMORY, PADDED))


def attention_sources(kind: str, plain: bool) -> tuple[str, str]:
    """`forward` and `backward`, for heads of a C++ type, float or bf16. They are compiled side by side.

    plain: for calls that have neither a mask nor dropout.
    """
    shared = INTEGERS + FLOATS + HEADS + _TYPES + f"typedef {kind} T;\n" + _SHARED + scores_source(plain)
    return shared + _FORWARD, shared + _BACKWARD
