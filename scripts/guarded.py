"""A command with every tensor between pages that nothing may touch: python scripts/guarded.py [--below] [--] command...

    python scripts/guarded.py -- python -m pytest -q tests/compiler/lowering
    python scripts/guarded.py --below                     # the tests of generated kernels and of our own operators

Tensors of a CPU end at the end of a page (`--below`: begin at the start of one), the pages around them cannot be read
or written, and memory that was freed is never used again: a kernel, an operator of ours or of ATen that leaves its
tensors ends the process there, by signal 11, and faulthandler says which line called it. What is written within the 63
bytes that alignment leaves behind a tensor is found when it is freed, and ends the process by signal 4. Linux alone; a
C compiler is needed. The exit code is the command's, of one that a signal ended 128 and the signal. Measurements begin
anew, in a cache folder of this run's own, because they run calls on made-up inputs.
Without a command these tests are run:
{tests}
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/compiler/lowering",
    "tests/compiler/codegen/cpp",
    "tests/compiler/optimizers",
    "tests/compiler/schedule",
    "tests/measure",
    "tests/ops",
)
# What is tested there is what glibc's allocator does.
OF_GLIBC = ("tests/compiler/schedule/test_memory.py::test_a_steady_step_takes_no_new_pages",)
_ALLOCATOR = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE UINT64_C(4096)
#define ALIGNMENT UINT64_C(64)
#define SPAN (UINT64_C(1) << 42)
#define FILL 0xA5
static char *base;
static uint64_t *sizes; /* by the number of a block's first page */
static _Atomic uint64_t next_page = 1;
static int below;
static void (*free_of_libc)(void *);
static int (*memalign_of_libc)(void **, size_t, size_t);

__attribute__((constructor)) static void begin(void) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  free_of_libc = (void (*)(void *))dlsym(RTLD_NEXT, "free");
  memalign_of_libc = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
  below = getenv("GUARDED_BELOW") != NULL;
  char *span = mmap(NULL, SPAN, PROT_NONE, flags, -1, 0);
  sizes = mmap(NULL, SPAN / PAGE * sizeof *sizes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (span == MAP_FAILED || sizes == MAP_FAILED) abort();
  base = span;
}

/* Torch asks for this alignment, and hardly anybody else does. */
int posix_memalign(void **result, size_t alignment, size_t size) {
  if (!base || alignment != ALIGNMENT || !size) return memalign_of_libc(result, alignment, size);
  uint64_t bytes = (size + PAGE - 1) / PAGE * PAGE, first = atomic_fetch_add(&next_page, bytes / PAGE + 1);
  char *block = base + first * PAGE;
  if ((first + 1) * PAGE + bytes > SPAN || mprotect(block, bytes, PROT_READ | PROT_WRITE)) return ENOMEM;
  char *start = below ? block : block + ((bytes - size) & ~(ALIGNMENT - 1));
  uint64_t rest = block + bytes - (start + size);
  memset(start + size, FILL, rest < ALIGNMENT ? rest : ALIGNMENT);
  sizes[first] = size;
  *result = start;
  return 0;
}

void free(void *given) {
  char *start = given;
  if (!base || start < base || start >= base + SPAN) {
    free_of_libc(given);
    return;
  }
  uint64_t first = (start - base) / PAGE, size = sizes[first], bytes = (size + PAGE - 1) / PAGE * PAGE;
  char *end = base + first * PAGE + bytes;
  if (!size) __builtin_trap(); /* freed twice */
  for (char *at = start + size; at < end && at < start + size + ALIGNMENT; at++)
    if ((unsigned char)*at != FILL) __builtin_trap(); /* written behind its end */
  sizes[first] = 0;
  mprotect(base + first * PAGE, bytes, PROT_NONE);
  madvise(base + first * PAGE, bytes, MADV_DONTNEED);
}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").format(tests="  " + "\n  ".join(TESTS)),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--below", action="store_true", help="guard what lies before tensors, not what lies behind")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    command = command or [sys.executable, "-m", "pytest", "-q", *TESTS, *(f"--deselect={test}" for test in OF_GLIBC)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            library = build(Path(folder))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"guarded.py: no allocator could be compiled: {error}", file=sys.stderr)
            return 2
        environment = dict(os.environ, LD_PRELOAD=str(library), AOTTRAIN_CACHE_DIR=f"{folder}/cache")
        environment |= {"PYTHONFAULTHANDLER": "1"} | ({"GUARDED_BELOW": "1"} if options.below else {})
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        return status if status >= 0 else 128 - status  # by a signal, as a shell says it


def build(folder: Path) -> Path:
    """The allocator, as a library that stands before libc's."""
    (folder / "cache").mkdir(mode=0o700)
    source, library = folder / "guarded.c", folder / "guarded.so"
    source.write_text(_ALLOCATOR, encoding="utf-8")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)
    return library


if __name__ == "__main__":
    sys.exit(main())
