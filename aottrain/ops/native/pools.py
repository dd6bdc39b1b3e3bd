"""The C++ of `ops.pools`: gradients of maximum pooling, added where the maxima were."""

from aottrain.ops.native.shared import INTEGERS

POOLS = (
    INTEGERS
    + """\
#include <cstring>
struct Pool { i64 planes, rows, columns, results, across, window, step_rows, step_columns, pad_rows, pad_columns; };
template <class T> static void scatter(T* to, const i8* taps, const T* from, const Pool* n, int threads) {
  i64 offsets[128];  // of a place in a window from the window's first
  for (i64 tap = 0; tap < 128; tap++) offsets[tap] = tap / n->window * n->columns + tap % n->window;
  const i64 size = n->rows * n->columns, results = n->results * n->across;
  #pragma omp parallel for num_threads(threads)
  for (i64 plane = 0; plane < n->planes; plane++) {
    T* __restrict const a = to + plane * size;
    const i8* __restrict tap = taps + plane * results;
    const T* __restrict b = from + plane * results;
    memset(a, 0, size * sizeof(T));
    for (i64 row = 0; row < n->results; row++) {
      i64 first = (row * n->step_rows - n->pad_rows) * n->columns - n->pad_columns;
      for (i64 column = 0; column < n->across; column++, first += n->step_columns) {
        i64 place = first + offsets[*tap++ & 127];
        place = place < 0 ? 0 : place < size ? place : size - 1;  // no pool gives such a tap
        a[place] += *b++;
      }
    }
  }
}
extern "C" void scatter_float(float* to, const i8* taps, const float* from, const Pool* n, int threads) {
  scatter(to, taps, from, n, threads);
}
extern "C" void scatter_double(double* to, const i8* taps, const double* from, const Pool* n, int threads) {
  scatter(to, taps, from, n, threads);
}
"""
)
