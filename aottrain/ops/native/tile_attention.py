"""The C++ of `ops.attention` for heads of bfloat16 by a processor's tiles (Intel's AMX), without mask and dropout.

As `ops.native.attention`, after Dao et al., "FlashAttention", 2022: the same results of the same arguments. Products
are of bfloat16, summed in float32; scores, exponentials and their sums are float32; probabilities and the gradients of
scores are rounded to bfloat16 before they are multiplied, as ATen rounds them.

Scores are computed transposed, (keys, queries): a vector has a number of 16 queries, so that maxima and sums go down a
column, and what is rounded lies as products need it. Of a square of 32 keys and 32 queries, with K, V, Q and G (the
result's gradient) of 32 rows each:

    S^T = K Q^T           O^T += V^T P^T
    dP^T = V G^T          dV += P^T G    dK += dS^T Q    dQ^T += K^T dS^T

A left operand has rows of 32 bfloat16; a right one has rows of pairs, of two terms of one column each. Both are squares
of two tiles, 2 KiB, packed so once a head. On a processor without tiles the same is done by plain loops: for tests.
"""

from string import Template

from aottrain.ir.kernels.attention import (
    TILE_BACKWARD_MEMORY,
    TILE_BLOCKS,
    TILE_FORWARD_MEMORY,
    TILE_PADDED,
)
from aottrain.ops.native.heads import HEADS, divided, workspace
from aottrain.ops.native.scores import RULE
from aottrain.ops.native.shared import FLOATS, INTEGERS, with_parts
from aottrain.ops.native.tile_layer import TILE_LAYER

_SHARED = Template("""\
enum : int64_t { $BLOCKS, HALF = SIDE / 2, TILE = HALF * SIDE, SQUARE = SIDE * SIDE };
typedef bf16 T;
$TILE_LAYER
#define CORNERS(move) \\
  { move(0, out, step) move(1, out + HALF, step) \\
    move(2, out + HALF * step, step) move(3, out + HALF * step + HALF, step) }
// A square of the result, of `num` squares of each operand, so many elements apart. It adds to what is in it, or not.
INLINE void product(const u16* a, int64_t a_step, const u16* b, int64_t b_step, int64_t num, float* out, int64_t step,
                    bool adds) {
  REGISTERS
  if (adds) CORNERS(LOAD)
  else { ZERO(0) ZERO(1) ZERO(2) ZERO(3) }
  for (int64_t k = 0; k < num; k++, a += a_step, b += b_step) {
    LOAD(4, a, HALF) LOAD(6, b, HALF) LOAD(7, b + TILE, HALF) LOAD(5, a + TILE, HALF)
    MULTIPLY(0, 4, 6) MULTIPLY(1, 4, 7) MULTIPLY(2, 5, 6) MULTIPLY(3, 5, 7)
  }
  CORNERS(SAVE)
}
// Where the squares of some rows go, those of 32 rows one after the other. rows: a left operand whose rows are these;
// turned: a right one whose columns are these rows; pairs: a right one whose terms are these rows; turned_pairs: a left
// one whose rows are the columns. Or null.
struct Packed { u16 *rows, *turned, *pairs, *turned_pairs; };
static void pack(Rows<const T> x, int64_t from, int64_t count, int64_t columns, const Packed& to) {
  alignas(64) u16 memory[2 * SQUARE];
  int64_t at = 0;
  for (int64_t i = 0; i < count; i += SIDE)
    for (int64_t d = 0; d < columns; d += SIDE, at += SQUARE) {
      u16* rows = to.rows ? to.rows + at : memory;
      for (int64_t r = 0; r < SIDE; r++)
        save(rows + r * SIDE, fetch(x[from + i + r] + d, i + r < count ? columns - d : 0));
      for (int64_t t = 0; to.turned && t < SQUARE; t += TILE) turn(rows + t, HALF, to.turned + at + t, HALF);
      if (!to.pairs && !to.turned_pairs) continue;
      u16* pairs = to.pairs ? to.pairs + at : memory + SQUARE;
      for (int64_t r = 0; r < SIDE; r += 2)
        interleave(load(rows + r * SIDE), load(rows + (r + 1) * SIDE), pairs + r * HALF);
      for (int64_t t = 0; to.turned_pairs && t < SQUARE; t += TILE)
        turn(pairs + t, HALF, to.turned_pairs + at + t, HALF);
    }
}
// Rows that are written soon.
INLINE void announce(Rows<T> out, int64_t from, int64_t count, int64_t columns) {
  for (int64_t i = from; i < from + count; i++)
    for (int64_t d = 0; d < columns; d += SIDE) __builtin_prefetch(out[i] + d, 1);
}
// x: (columns, SIDE), a column of it for each row of the result, which is multiplied by its factor and rounded.
static void unpack_turned(const float* x, const float* factors, Rows<T> out, int64_t from, int64_t count,
                          int64_t columns) {
  alignas(64) float scaled[SQUARE], rows[SQUARE];
  for (int64_t d = 0; d < columns; d += SIDE) {
    for (int64_t i = 0; i < SQUARE; i += HALF)
      save(scaled + i, load(x + d * SIDE + i) * load(factors + i % SIDE));
    for (int64_t i = 0; i < SIDE; i += HALF)
      for (int64_t j = 0; j < SIDE; j += HALF) turn(scaled + i * SIDE + j, SIDE, rows + j * SIDE + i, SIDE);
    for (int64_t i = 0; i < count; i++)
      put(out[from + i] + d, columns - d, rounded(load(rows + i * SIDE), load(rows + i * SIDE + HALF)));
  }
}
// The first n of SIDE.
INLINE u32 first_of(int64_t n) { return n >= SIDE ? 0xFFFFFFFFu : n <= 0 ? 0 : (1u << n) - 1; }
""")

_FORWARD = Template("""\
$LOG
// Of a square of queries: of each the largest score, and the sum of exponentials without it.
struct Sums { vec most[2], total[2]; };
// Probabilities of these queries and the keys from `start` on, `num` of them and as many more as fill squares, into
// pairs of keys. Returns what is to be done to what was summed before: kept, where it is not 1.
INLINE bool softmax(float* scores, u16* p, int64_t first, int64_t start, int64_t num, bool causal, float scale,
                    Sums& sums, vec kept[2]) {
  const vec none = -__builtin_inff();
  const int64_t all = padded(num, SIDE), hidden = causal ? first - start : num;  // keys from it on not all see
  vec m[2] = {none, none};
  for (int64_t j = 0; j < num; j++)
    UNROLL for (int h = 0; h < 2; h++) {
      float* place = scores + j * SIDE + h * HALF;
      vec x = load(place) * scale;
      if (j > hidden) x = where(~first_of(j - hidden) >> h * HALF, x, none);
      save(place, x);
      m[h] = larger(x, m[h]);
    }
  for (int64_t j = num; j < all; j++) { save(scores + j * SIDE, none); save(scores + j * SIDE + HALF, none); }
  vec base[2], part[2] = {0.0f, 0.0f};
  bool changes = false;
  for (int h = 0; h < 2; h++) {
    m[h] = larger(m[h], sums.most[h]);
    base[h] = larger(m[h], -3.4028235e38f);  // of -inf, too, it can be taken off
    kept[h] = exp_(sums.most[h] - base[h]);
    changes |= differ(kept[h], 1.0f);
    sums.most[h] = m[h];
  }
  for (int64_t j = 0; j < all; j += 2) {
    line rows[2];
    UNROLL for (int o = 0; o < 2; o++) {
      vec e[2];
      UNROLL for (int h = 0; h < 2; h++) {
        e[h] = exp_(load(scores + (j + o) * SIDE + h * HALF) - base[h]);
        part[h] = part[h] + e[h];
      }
      rows[o] = rounded(e[0], e[1]);
    }
    interleave(rows[0], rows[1], p + j / SIDE * SQUARE + j % SIDE * HALF);
  }
  for (int h = 0; h < 2; h++) sums.total[h] = fma_(sums.total[h], kept[h], part[h]);
  return changes;
}
static void forward_head(Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<T> out, Rows<float> lse,
                         const Sizes& n, const Rule& rule, float scale, float* memory) {
  const float inf = __builtin_inff();
  $MEMORY
  pack(k, 0, n.keys, n.columns, {keys});
  pack(v, 0, n.keys, n.columns, {nullptr, nullptr, nullptr, values});
  for (int64_t first = 0; first < n.queries; first += SIDE) {
    const int64_t count = least(SIDE, n.queries - first), end = rule.causal ? least(first + count, n.keys) : n.keys;
    Sums of{{-inf, -inf}, {0.0f, 0.0f}};
    pack(q, first, count, n.columns, {nullptr, own});
    announce(out, first, count, n.columns);
    for (int64_t start = 0; start < end; start += KEYS) {
      const int64_t num = least(KEYS, end - start), squares = padded(num, SIDE) / SIDE;
      for (int64_t j = 0; j < squares; j++)
        product(keys + (start + j * SIDE) * width, SQUARE, own, SQUARE, width / SIDE, scores + j * SQUARE, SIDE, false);
      vec kept[2];
      if (softmax(scores, p, first, start, num, rule.causal, scale, of, kept) && start)
        for (int64_t i = 0; i < SIDE * width; i += HALF) save(sums + i, load(sums + i) * kept[i / HALF % 2]);
      for (int64_t d = 0; d < width; d += SIDE)
        product(values + start * width + d * SIDE, width * SIDE, p, SQUARE, squares, sums + d * SIDE, SIDE, start > 0);
    }
    if (!end) memset(sums, 0, SIDE * width * sizeof(float));
    alignas(64) float most[SIDE], total[SIDE], factor[SIDE], rest[SIDE];
    for (int h = 0; h < 2; h++) { save(most + h * HALF, of.most[h]); save(total + h * HALF, of.total[h]); }
    const bool safe = rule.safe;
    #pragma omp simd
    for (int i = 0; i < SIDE; i++) {
      const bool empty = (total[i] == 0) & safe;
      most[i] = empty ? 0.0f : most[i];
      factor[i] = empty ? 1.0f : 1.0f / total[i];
      rest[i] = empty ? 0.0f : log_(total[i]);
    }
    unpack_turned(sums, factor, out, first, count, n.columns);
    for (int64_t i = 0; i < count; i++) {
      lse[first + i][0] = rule.split ? most[i] : most[i] + rest[i];
      if (rule.split) lse[first + i][1] = rest[i];
    }
  }
}
extern "C" void forward(void* const* p, const void*, const int64_t* sizes, const Numbers* numbers, float* memory,
                        int64_t each, int threads) {
  READ_SIZES
  FORWARD_TENSORS
  #pragma omp parallel num_threads(threads)
  {
    const Tiles tiles;
    #pragma omp for collapse(2) schedule(dynamic)
    for (int64_t b = 0; b < n.batch; b++)
      for (int64_t h = 0; h < n.heads; h++) {
        const int64_t own = h / n.group();
        forward_head(q.at(b, h), k.at(b, own), v.at(b, own), out.at(b, h), lse.at(b, h), n, rule, numbers->scale,
                     memory + omp_get_thread_num() * each);
      }
  }
}
""")

_BACKWARD = Template("""\
$WORKSPACE
static void pack_keys(Rows<const T> k, Rows<const T> v, const Sizes& n, const Workspace& w) {
  pack(k, 0, n.keys, n.columns, {w.keys, nullptr, nullptr, w.turned_keys});
  pack(v, 0, n.keys, n.columns, {w.values});
  memset(w.dks, 0, w.all * w.width * sizeof(float));
  memset(w.dvs, 0, w.all * w.width * sizeof(float));
}
static void pack_queries(Rows<const T> g, Rows<const T> q, Rows<const T> out, Rows<const float> lse, const Sizes& n,
                         const Workspace& w, bool split) {
  // The results' squares, to multiply the gradients': they lie where the gradients of queries grow later.
  u16* results = (u16*)w.dqs;
  pack(q, 0, n.queries, n.columns, {nullptr, w.queries, w.query_pairs});
  pack(g, 0, n.queries, n.columns, {nullptr, w.grads, w.grad_pairs});
  pack(out, 0, n.queries, n.columns, {nullptr, results});
  // In the order and with the rounding of `product`: of a query with one key both products are equal.
  for (int64_t i = 0; i < w.tall; i += HALF) {
    vec sum = 0.0f;
    for (int64_t d = 0; d < w.width; d += SIDE) {
      const int64_t at = i / SIDE * SIDE * w.width + d * SIDE + i % SIDE * SIDE;
      vec first = 0.0f, second = 0.0f;
      for (int64_t r = 0; r < TILE; r += SIDE) {
        const line x = load(w.grads + at + r), y = load(results + at + r);
        first = fma_(even(x), even(y), first);
        second = fma_(odd(x), odd(y), second);
      }
      sum = sum + (first + second);
    }
    save(w.deltas + i, sum);
  }
  for (int64_t i = 0; i < w.tall; i++) {
    w.logs[i] = i < n.queries ? lse[i][0] : __builtin_inff();
    w.rests[i] = i < n.queries && split ? lse[i][1] : 0.0f;
  }
  memset(w.dqs, 0, w.tall * w.width * sizeof(float));
}
// Of a square: probabilities and gradients of scores, rounded, from scores and the gradients of probabilities. some:
// not every query sees every key, or there are fewer of them.
template <bool some>
static void slopes(int64_t first, int64_t start, const float* scores, const float* dps, const Sizes& n,
                   const Workspace& w, bool causal, float scale, u16* p, u16* ds, u16* ds_pairs) {
  vec log[2], rest[2], delta[2];
  for (int h = 0; h < 2; h++) {
    log[h] = load(w.logs + first + h * HALF);
    rest[h] = load(w.rests + first + h * HALF);
    delta[h] = load(w.deltas + first + h * HALF);
  }
  for (int64_t r = 0; r < SIDE; r += 2) {
    line lines[2];
    UNROLL for (int o = 0; o < 2; o++) {
      const int64_t j = r + o, key = start + j;
      u32 seen = 0;
      if (some && key < n.keys) seen = first_of(n.queries - first) & ~(causal ? first_of(key - first) : 0);
      vec x[2], y[2];
      UNROLL for (int h = 0; h < 2; h++) {
        x[h] = exp_(load(scores + j * SIDE + h * HALF) * scale - log[h] - rest[h]);
        y[h] = x[h] * (load(dps + j * SIDE + h * HALF) - delta[h]);
        if (!some) continue;
        x[h] = where(seen >> h * HALF, x[h], 0.0f);
        y[h] = where(seen >> h * HALF, y[h], 0.0f);
      }
      save(p + j * SIDE, rounded(x[0], x[1]));
      lines[o] = rounded(y[0], y[1]);
      save(ds + j * SIDE, lines[o]);
    }
    interleave(lines[0], lines[1], ds_pairs + r * HALF);
  }
}
// The queries from `first` on and a square of keys from `start` on.
static void backward_block(int64_t first, int64_t start, const Sizes& n, const Workspace& w, bool causal, float scale) {
  const int64_t width = w.width, steps = width / SIDE, number = least(QUERIES, w.tall - first) / SIDE;
  // The products of a square are under way while the one before it is worked at.
  for (int64_t i = 0; i <= number; i++) {
    const int64_t query = first + i * SIDE, before = i - 1, at = i % 2 * SQUARE, last = SQUARE - at;
    if (i < number) {
      product(w.keys + start * width, SQUARE, w.queries + query * width, SQUARE, steps, w.scores + at, SIDE, false);
      product(w.values + start * width, SQUARE, w.grads + query * width, SQUARE, steps, w.dps + at, SIDE, false);
    }
    if (!i) continue;
    const bool some = (causal && query - SIDE < start + SIDE) || query > n.queries || start + SIDE > n.keys;
    const auto function = some ? slopes<true> : slopes<false>;
    function(query - SIDE, start, w.scores + last, w.dps + last, n, w, causal, scale, w.p + before * SQUARE,
             w.ds + before * SQUARE, w.ds_pairs + before * SQUARE);
  }
  for (int64_t d = 0; d < width; d += SIDE) {
    const int64_t at = first * width + d * SIDE, out = start * width + d;
    product(w.p, SQUARE, w.grad_pairs + at, width * SIDE, number, w.dvs + out, width, true);
    product(w.ds, SQUARE, w.query_pairs + at, width * SIDE, number, w.dks + out, width, true);
    for (int64_t i = 0; i < number; i++)
      product(w.turned_keys + start * width + d * SIDE, 0, w.ds_pairs + i * SQUARE, 0, 1,
              w.dqs + at + i * SIDE * width, SIDE, true);
  }
}
static void unpack(const float* x, int64_t width, int64_t count, int64_t columns, float factor, Rows<T> out) {
  for (int64_t i = 0; i < count; i++) {
    announce(out, least(i + HALF, count - 1), 1, columns);
    for (int64_t d = 0; d < columns; d += SIDE) {
      const float* place = x + i * width + d;
      put(out[i] + d, columns - d, rounded(load(place) * factor, load(place + HALF) * factor));
    }
  }
}
extern "C" void backward(void* const* p, const void*, const int64_t* sizes, const Numbers* numbers, float* memory,
                         int64_t each, int threads) {
  READ_SIZES
  BACKWARD_TENSORS
  const float scale = numbers->scale;
  float factors[SIDE];
  for (int i = 0; i < SIDE; i++) factors[i] = scale;
  #pragma omp parallel num_threads(threads)
  {
    const Tiles tiles;
    #pragma omp for collapse(2) schedule(dynamic)
    for (int64_t b = 0; b < n.batch; b++)
      for (int64_t own = 0; own < n.key_heads; own++) {
        const Workspace w(n, memory + omp_get_thread_num() * each);
        pack_keys(k.at(b, own), v.at(b, own), n, w);
        for (int64_t h = own * n.group(); h < (own + 1) * n.group(); h++) {
          pack_queries(g.at(b, h), q.at(b, h), out.at(b, h), lse.at(b, h), n, w, rule.split);
          for (int64_t start = 0; start < n.keys; start += SIDE)
            for (int64_t first = rule.causal ? start : 0; first < n.queries; first += QUERIES)
              backward_block(first, start, n, w, rule.causal, scale);
          for (int64_t i = 0; i < n.queries; i += SIDE) {
            const int64_t count = least(SIDE, n.queries - i);
            announce(dq.at(b, h), i, count, n.columns);
            unpack_turned(w.dqs + i * w.width, factors, dq.at(b, h), i, count, n.columns);
          }
        }
        unpack(w.dks, w.width, n.keys, n.columns, scale, dk.at(b, own));
        unpack(w.dvs, w.width, n.keys, n.columns, 1.0f, dv.at(b, own));
      }
  }
}
""")


def tile_attention_sources(emulated: bool) -> tuple[str, str]:
    """`forward` and `backward`, for heads of bfloat16. emulated: by plain loops also where the processor has tiles."""
    blocks = ", ".join(f"{name} = {size}" for name, size in TILE_BLOCKS.items())
    shared = _SHARED.substitute(BLOCKS=blocks, TILE_LAYER=TILE_LAYER)
    texts = (
        _FORWARD.substitute(
            LOG=with_parts("$LOG"), MEMORY="\n  ".join(divided(TILE_FORWARD_MEMORY, TILE_PADDED, variables=True))
        ),
        _BACKWARD.substitute(WORKSPACE=workspace(TILE_BACKWARD_MEMORY, TILE_PADDED)),
    )
    start = "#define EMULATED\n" * emulated + INTEGERS + FLOATS + HEADS + shared + RULE
    return start + texts[0], start + texts[1]
