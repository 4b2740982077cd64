// A parallel-for of the core's own, for callers whose framework hands none.
#pragma once

#include "core.h"

namespace fastaccum::cpu {

// Runs on the calling thread and up to pool_threads() - 1 others, which sleep in between. One job at a
// time: a caller that comes while another one's job runs waits for its end. A child process that was
// forked has none of its parent's threads and starts its own.
FASTACCUM_API extern const ParallelFor kPool;

// Threads that a job may use: FASTACCUM_THREADS if that is a number from 1 to 1024, else as many as this
// process may run on. Read once.
FASTACCUM_API int pool_threads();

}  // namespace fastaccum::cpu
