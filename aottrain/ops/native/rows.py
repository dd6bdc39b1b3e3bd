"""The C++ of `ops.rows`: rows that are added to others by their numbers, in order; looked up and scaled ones, too."""

from aottrain.ops.native.shared import INTEGERS

ROWS = (
    INTEGERS
    + """\
#include <cstdlib>
#include <cstring>
extern "C" int omp_get_thread_num(void); extern "C" int omp_get_num_threads(void);
struct Sizes { i64 count, rows, width, step, left_out, sources, lowest, groups; };
// Columns first to end of b, of which each of `groups` equal parts of `width` is multiplied by a number of its own, to
// those of a; or in the place of zeros that are there.
template <bool FIRST> static inline void add(
    float* __restrict a, const float* __restrict b, const float* scale, i64 first, i64 end, i64 part) {
  if (!scale) {
    #pragma omp simd
    for (i64 j = first; j < end; j++) a[j] = (FIRST ? 0.0f : a[j]) + b[j];  // of -0 as of 0
    return;
  }
  for (i64 g = first / part; g * part < end; g++) {
    const i64 from = g * part > first ? g * part : first, to = (g + 1) * part < end ? (g + 1) * part : end;
    const float by = scale[g];
    #pragma omp simd
    for (i64 j = from; j < to; j++) a[j] = (FIRST ? 0.0f : a[j]) + b[j] * by;
  }
}
// Row i begins at from + i * step, or where there is a `source` at from + source[i] * step, of which numbers below 0,
// where they are allowed (`lowest`), count from the end. scale: null, or (count, groups). Rows numbered `left_out` are
// not added. fresh: there is nothing in `to` yet. Rows are added to zeros that are not written: the first one takes
// their place. 1, and nothing is written, where a number is outside.
extern "C" int add_rows(
    float* to, const i64* index, const float* from, const i64* source, const float* scale, const Sizes* n, int fresh,
    int threads) {
  i64 wrong = 0;
  for (i64 i = 0; i < n->count; i++) wrong |= (u64)index[i] >= (u64)n->rows;
  for (i64 i = 0; source && i < n->count; i++) wrong |= source[i] < n->lowest || source[i] >= n->sources;
  if (wrong) return 1;
  u8* is_first = fresh ? (u8*)calloc(n->count + n->rows, 1) : nullptr;
  u8* is_there = is_first ? is_first + n->count : nullptr;
  if (fresh && !is_first) memset(to, 0, n->rows * n->width * sizeof(float));
  for (i64 i = 0; is_first && i < n->count; i++) {
    if (index[i] == n->left_out) continue;
    is_first[i] = !is_there[index[i]];
    is_there[index[i]] = 1;
  }
  #pragma omp parallel num_threads(threads)
  {
    // Each thread has some columns of all rows: each sum keeps its order, whatever their number.
    const i64 thread = omp_get_thread_num(), all = omp_get_num_threads(), lines = (n->width + 15) / 16;
    const i64 first = lines * thread / all * 16, last = lines * (thread + 1) / all * 16;
    const i64 end = last < n->width ? last : n->width, part = n->width / n->groups;
    for (i64 i = 0; i < n->count; i++) {
      if (index[i] == n->left_out) continue;
      float* a = to + index[i] * n->width;
      const i64 row = !source ? i : source[i] < 0 ? source[i] + n->sources : source[i];
      const float *b = from + row * n->step, *by = scale ? scale + i * n->groups : nullptr;
      if (is_first && is_first[i]) add<true>(a, b, by, first, end, part);
      else add<false>(a, b, by, first, end, part);
    }
    // Rows that are named nowhere, whole.
    const i64 last_row = n->rows * (thread + 1) / all;
    for (i64 row = is_there ? n->rows * thread / all : last_row; row < last_row; row++)
      if (!is_there[row]) memset(to + row * n->width, 0, n->width * sizeof(float));
  }
  free(is_first);
  return 0;
}
"""
)
