"""What the C++ texts of attention have in common: where heads lie, and how a thread's memory is divided."""

from collections.abc import Mapping, Sequence
from string import Template

from aottrain.ir.kernels.attention import Part

HEADS = """\
#include <cstdint>
#include <cstring>
extern "C" int omp_get_thread_num(void);
INLINE int64_t padded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
// exp where what is below the smallest normal number may as well be 0.
INLINE float exp_(float x) {
  const float c = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
  float n;
  const float part = reduced_exp_(c, n), y = part * bits_<float>(((i32)n + 127) << 23);
  return x != x ? x : (x < -87.0f ? 0.0f : y);
}
// key_heads: each serves heads / key_heads heads of queries, one after another.
struct Sizes {
  int64_t batch, heads, key_heads, queries, keys, columns;
  int64_t group() const { return heads / key_heads; }
};
// Rows of a head, `step` elements apart.
template <class E> struct Rows {
  E* first; int64_t step;
  E* operator[](int64_t row) const { return first + row * step; }
};
// A tensor of heads. strides: of batch, head and row, in elements.
template <class E> struct Heads {
  E* first; const int64_t* strides;
  Rows<E> at(int64_t batch, int64_t head) const {
    return {first + batch * strides[0] + head * strides[1], strides[2]};
  }
};
// A thread has `each` numbers of the memory. p: the tensors, and the mask or null; sizes: those of Sizes, the Rule,
// then the strides of each tensor in turn.
#define READ_SIZES \\
  const Sizes n = *(const Sizes*)sizes; \\
  const Rule rule = *(const Rule*)(sizes + sizeof(Sizes) / sizeof(int64_t)); \\
  const int64_t* s = sizes + (sizeof(Sizes) + sizeof(Rule)) / sizeof(int64_t);
#define FORWARD_TENSORS \\
  const Heads<const T> q{(T*)p[0], s}, k{(T*)p[1], s + 3}, v{(T*)p[2], s + 6}; \\
  const Heads<T> out{(T*)p[3], s + 9}; \\
  const Heads<float> lse{(float*)p[4], s + 12};
#define BACKWARD_TENSORS \\
  const Heads<const T> g{(T*)p[0], s}, q{(T*)p[1], s + 3}, k{(T*)p[2], s + 6}, v{(T*)p[3], s + 9}; \\
  const Heads<const T> out{(T*)p[4], s + 12}; \\
  const Heads<const float> lse{(float*)p[5], s + 15}; \\
  const Heads<T> dq{(T*)p[6], s + 18}, dk{(T*)p[7], s + 21}, dv{(T*)p[8], s + 24};
"""

_WORKSPACE = Template("""\
// Where the gradients of a head of keys and values grow, and what each head of queries needs of them.
struct Workspace {
  $NAMES
  int64_t width, tall, all;
  Workspace(const Sizes& n, float* memory) {
    $MEMORY
  }
};
""")


def divided(parts: Sequence[Part], padded: Mapping[str, tuple[str, str]], variables: bool = False) -> list[str]:
    """C++ that gives each part its place, from `memory` on. padded: of each extent the size and what it is a multiple
    of. variables: they are declared here; otherwise members get their values."""
    extents = [name for name in padded if any(name in (part.rows, part.columns) for part in parts)]
    number = "const int64_t " if variables else ""
    lines = [f"{number}{name} = padded(n.{padded[name][0]}, {padded[name][1]});" for name in extents]
    end = "memory"
    for part in parts:
        for name in part.names:
            lines.append(f"{f'{part.type}* ' if variables else ''}{name} = ({part.type}*)({end});")
            end = " + ".join([name, " * ".join(filter(None, (part.rows, part.columns)))])
    return lines


def workspace(parts: Sequence[Part], padded: Mapping[str, tuple[str, str]]) -> str:
    """A C++ struct of all parts and their extents, for the backward."""
    names = " ".join(f"{part.type} {', '.join(f'*{name}' for name in part.names)};" for part in parts)
    return _WORKSPACE.substitute(NAMES=names, MEMORY="\n    ".join(divided(parts, padded)))
