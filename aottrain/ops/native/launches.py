"""The C++ of `runtime.cuda.direct`: launches of compiled CUDA kernels by the driver's own function."""

LAUNCHES = """\
// cuLaunchKernel, whatever library it was found in.
typedef int (*Start)(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                     unsigned shared, void* stream, void** arguments, void** more);
// places: of each argument among the buffers, which numbers of draws follow; -1 - i is part i of the scratch memory.
// nulls: arguments after those.
struct Step { void* function; unsigned programs, threads, shared; int count, nulls; const int* places; };
struct Steps { Start start; const Step* steps; const long long* parts; int count, buffers; };

// How many steps were started: all, or those before one that the driver refused; none where an address is not a
// multiple of 16, as the kernels were compiled for.
extern "C" int start_all(const Steps* all, void* stream, void** buffers, char* scratch) {
  unsigned long long bits = (unsigned long long)scratch;
  for (int i = 0; i < all->buffers; i++) bits |= (unsigned long long)buffers[i];
  if (bits & 15) return 0;
  for (int i = 0; i < all->count; i++) {
    const Step& step = all->steps[i];
    void* values[MOST]; void* arguments[MOST];
    for (int k = 0; k < step.count + step.nulls; k++) {
      const int place = k < step.count ? step.places[k] : 0;
      values[k] = k >= step.count ? nullptr : place >= 0 ? buffers[place] : scratch + all->parts[-1 - place];
      arguments[k] = &values[k];
    }
    if (all->start(step.function, step.programs, 1, 1, step.threads, 1, 1, step.shared, stream, arguments, nullptr))
      return i;
  }
  return all->count;
}
"""
