"""The core's own threads: every index once, from several callers, without a data race."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="the source tree is not beside the tests"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
]

DRIVER = """
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cpu/pool.h"

using Counts = std::vector<long>;

void body(std::int64_t begin, std::int64_t end, void* context) {
  for (std::int64_t i = begin; i < end; ++i) (*static_cast<Counts*>(context))[i] += i + 1;
}

// Jobs of 0 to 36 pieces: fewer than there are threads, as many, more.
void caller() {
  for (int job = 0; job < 300; ++job) {
    Counts counts(job % 37);
    fastaccum::cpu::kPool.run(static_cast<std::int64_t>(counts.size()), body, &counts);
    for (std::size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] == static_cast<long>(i + 1)) continue;
      std::printf("piece %zu of %zu: %ld\\n", i, counts.size(), counts[i]);
      std::exit(1);
    }
  }
}

int main() {
  std::thread first(caller), second(caller);
  caller();
  first.join();
  second.join();
  std::printf("every piece once\\n");
}
"""


@pytest.mark.parametrize("threads", [1, 5])
def test_every_piece_runs_once(threads, tmp_path):
    source, program = tmp_path / "driver.cpp", tmp_path / "driver"
    source.write_text(DRIVER)
    flags = ["-std=c++20", "-O1", "-g", "-pthread", "-fsanitize=thread", f"-I{ROOT / 'csrc'}"]
    subprocess.run(["g++", *flags, source, ROOT / "csrc/cpu/pool.cpp", "-o", program], check=True)
    # The sanitizer cannot live with every layout of the address space.
    fixed = [shutil.which("setarch"), "-R"] if shutil.which("setarch") else []
    done = subprocess.run(
        [*fixed, program],
        env={**os.environ, "FASTACCUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "every piece once\n" and "WARNING" not in done.stderr
