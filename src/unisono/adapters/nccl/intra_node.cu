// The all-reduce kernels of IntraNodeComm. NVRTC compiles this text for RANKS ranks, a number.
//
// Each rank has memory that all ranks have mapped: flags, then a slot for data. A call copies the
// input into the slot, meets the other ranks, and reads their slots. Block b of a rank reads only
// what the blocks b of other ranks have written, so blocks need not wait for one another.
//
// A call ends with a meeting: no rank reads the slot of another any more. So a rank may write into
// it again in the next call, which the stream begins after this one, or free it.
//
// A flag has the number of the last meeting, which only grows. It has 64 bits: the flags of a block
// that few calls use can be older than 2**32 meetings. The host can set `stop`, which ends every
// wait, because a rank that has died raises no flag. The result is then undefined.

struct alignas(16) Pack {
  unsigned word[4];
};

// A mirror of intra_node.py:_call_type.
struct Call {
  unsigned char* memory[RANKS];  // of each rank, as this rank has mapped it
  const unsigned char* input;
  unsigned char* output;   // may be the input
  const unsigned* stop;    // a word of the host
  unsigned long long nbytes;
  unsigned long long meeting;  // number of the first meeting of the call
  unsigned rank;
  unsigned quad;   // bits of the ranks that reduce together, this rank included
  unsigned relay;  // the rank with the sum of the other four
};

typedef unsigned long long Index;
typedef unsigned long long Meeting;

// Offsets. Partial results of `cube_mesh` have a place of their own, because the quad may still
// read the slot.
constexpr Index SLOT = 4096, PARTIAL = SLOT + (256 << 10);

// A test replaces these words of PTX by C++, and runs the kernels on a CPU.
#ifndef ON_A_CPU
static __device__ float widened(unsigned half) {
  float made;
  asm("cvt.f32.f16 %0, %1;" : "=f"(made) : "h"((unsigned short)half));
  return made;
}

static __device__ unsigned narrowed(float value) {
  unsigned short made;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(made) : "f"(value));
  return made;
}

// Pairs with `flag_of`. It releases what the whole block has written, because a barrier of the
// block comes before it.
static __device__ void raise_flag(Meeting* flag, Meeting meeting) {
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(flag), "l"(meeting) : "memory");
}

// Pairs with `raise_flag`.
static __device__ Meeting flag_of(const Meeting* flag) {
  Meeting seen;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(seen) : "l"(flag) : "memory");
  return seen;
}

static __device__ unsigned stop_of(const unsigned* stop) {
  unsigned seen;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(seen) : "l"(stop) : "memory");
  return seen;
}
#endif

// ---- arithmetic: a sum is in float32, and is rounded to the type at its end, as on the CPU --------

union Bits {
  unsigned word;
  float value;
};

struct Float32 {
  static constexpr int VALUES = 1;  // in a word
  static __device__ float value(unsigned word, int) { return Bits{word}.value; }
  static __device__ unsigned word(const float* values) {
    Bits bits;
    bits.value = values[0];
    return bits.word;
  }
};

struct Float16 {
  static constexpr int VALUES = 2;
  static __device__ float value(unsigned word, int i) { return widened(word >> 16 * i & 0xffff); }
  static __device__ unsigned word(const float* values) {
    return narrowed(values[0]) | narrowed(values[1]) << 16;
  }
};

struct BFloat16 {
  static constexpr int VALUES = 2;
  static __device__ float value(unsigned word, int i) {
    return Bits{i == 0 ? word << 16 : word & 0xffff0000}.value;
  }
  static __device__ unsigned rounded(float sum) {  // in the upper half
    Bits bits;
    bits.value = sum;
    return sum != sum ? bits.word | 0x400000 : bits.word + 0x7fff + (bits.word >> 16 & 1);
  }
  static __device__ unsigned word(const float* values) {
    return rounded(values[0]) >> 16 | (rounded(values[1]) & 0xffff0000);
  }
};

// ---- memory -------------------------------------------------------------------------------------

static __device__ Index packs_of(const Call& call) { return (call.nbytes + 15) / 16; }

// The packs of a thread: first(), then one every stride().
static __device__ Index first() { return (Index)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ Index stride() { return (Index)gridDim.x * blockDim.x; }

static __device__ Pack* packs_at(const Call& call, unsigned rank, Index offset) {
  return (Pack*)(call.memory[rank] + offset);
}

// A user's array may begin at any byte, and its last pack may be short. Both are rare, so those
// loops are not unrolled: that would take the compiler several times as long.
static __device__ bool is_whole(const Call& call, const unsigned char* array, Index i) {
  return (Index)array % 16 == 0 && 16 * i + 16 <= call.nbytes;
}

static __device__ void copy_in(const Call& call, Index i) {
  Pack pack = {};
  if (is_whole(call, call.input, i)) {
    pack = ((const Pack*)call.input)[i];
  } else {
#pragma unroll 1
    for (Index at = 16 * i; at < 16 * i + 16 && at < call.nbytes; at++)
      pack.word[at % 16 / 4] |= (unsigned)call.input[at] << at % 4 * 8;
  }
  packs_at(call, call.rank, SLOT)[i] = pack;
}

static __device__ void copy_out(const Call& call, Index i, const Pack& pack) {
  if (is_whole(call, call.output, i)) {
    ((Pack*)call.output)[i] = pack;
  } else {
#pragma unroll 1
    for (Index at = 16 * i; at < 16 * i + 16 && at < call.nbytes; at++)
      call.output[at] = (unsigned char)(pack.word[at % 16 / 4] >> at % 4 * 8);
  }
}

// Sums pack i of the ranks with a bit in `ranks`, in the order of ranks, so that all ranks compute
// the same bits.
template <class T>
static __device__ Pack sum_of(const Call& call, unsigned ranks, Index i) {
  Pack read[RANKS], sum;
  // All loads before the first addition, so that they overlap.
#pragma unroll
  for (unsigned rank = 0; rank < RANKS; rank++)
    if (ranks >> rank & 1) read[rank] = packs_at(call, rank, SLOT)[i];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float values[T::VALUES];
    bool any = false;
#pragma unroll
    for (unsigned rank = 0; rank < RANKS; rank++) {
      if (!(ranks >> rank & 1)) continue;
      for (int k = 0; k < T::VALUES; k++) {
        float value = T::value(read[rank].word[i], k);
        values[k] = any ? values[k] + value : value;
      }
      any = true;
    }
    sum.word[i] = T::word(values);
  }
  return sum;
}

// ---- meetings -----------------------------------------------------------------------------------

// Ranks that meet see what each of them has written before. False: the host has stopped the call.
static __device__ bool meet(const Call& call, unsigned ranks, Meeting meeting) {
  __syncthreads();
  unsigned peer = threadIdx.x;
  bool stopped = false;
  if (peer < RANKS && peer != call.rank && ranks >> peer & 1) {
    unsigned row = blockIdx.x * RANKS;
    raise_flag((Meeting*)call.memory[peer] + row + call.rank, meeting);
    const Meeting* flag = (const Meeting*)call.memory[call.rank] + row + peer;
    // The host's word is far away: it is read rarely.
    for (unsigned turn = 1; flag_of(flag) < meeting && !stopped; turn++)
      stopped = turn % 64 == 0 && stop_of(call.stop) != 0;
  }
  return !__syncthreads_or(stopped);
}

// ---- kernels ------------------------------------------------------------------------------------

constexpr unsigned EVERYONE = (1u << RANKS) - 1;

template <class T>
static __device__ void one_shot(const Call& call) {
  Index packs = packs_of(call);
  for (Index i = first(); i < packs; i += stride()) copy_in(call, i);
  if (!meet(call, EVERYONE, call.meeting)) return;
  for (Index i = first(); i < packs; i += stride()) copy_out(call, i, sum_of<T>(call, EVERYONE, i));
  meet(call, EVERYONE, call.meeting + 1);
}

// Part q of the data is what rank q reduces. In every part a thread has the same packs.
template <class T>
static __device__ void two_shot(const Call& call) {
  Index packs = packs_of(call), part = (packs + RANKS - 1) / RANKS;
  for (unsigned q = 0; q < RANKS; q++)
    for (Index i = first(); i < part && q * part + i < packs; i += stride())
      copy_in(call, q * part + i);
  if (!meet(call, EVERYONE, call.meeting)) return;
  Index begin = call.rank * part;
  // No other rank reads this part of this rank's slot before the second meeting.
  for (Index i = first(); i < part && begin + i < packs; i += stride()) {
    Pack sum = sum_of<T>(call, EVERYONE, begin + i);
    packs_at(call, call.rank, SLOT)[begin + i] = sum;
    copy_out(call, begin + i, sum);
  }
  if (!meet(call, EVERYONE, call.meeting + 1)) return;
  for (unsigned turn = 1; turn < RANKS; turn++) {
    unsigned q = (call.rank + turn) % RANKS;  // not all ranks read from one rank
    for (Index i = first(); i < part && q * part + i < packs; i += stride())
      copy_out(call, q * part + i, packs_at(call, q, SLOT)[q * part + i]);
  }
  meet(call, EVERYONE, call.meeting + 2);
}

template <class T>
static __device__ void cube_mesh(const Call& call) {
  Index packs = packs_of(call);
  for (Index i = first(); i < packs; i += stride()) copy_in(call, i);
  if (!meet(call, call.quad, call.meeting)) return;
  for (Index i = first(); i < packs; i += stride())
    packs_at(call, call.rank, PARTIAL)[i] = sum_of<T>(call, call.quad, i);
  if (!meet(call, 1u << call.relay, call.meeting + 1)) return;
  for (Index i = first(); i < packs; i += stride()) {
    Pack sum = packs_at(call, call.rank, PARTIAL)[i];
    const Pack& other = packs_at(call, call.relay, PARTIAL)[i];
    for (int at = 0; at < 4; at++) {
      float values[T::VALUES];
      for (int k = 0; k < T::VALUES; k++)
        values[k] = T::value(sum.word[at], k) + T::value(other.word[at], k);
      sum.word[at] = T::word(values);
    }
    copy_out(call, i, sum);
  }
  meet(call, call.quad | 1u << call.relay, call.meeting + 2);
}

// Of a block, as in intra_node.py: so the compiler leaves enough registers to each of them.
constexpr unsigned THREADS = 512;

// __grid_constant__: without it each thread would copy the call, to index its memory.
#define KERNEL(algorithm, name, type)                                            \
  extern "C" __global__ void __launch_bounds__(THREADS)                          \
      algorithm##_##name(const __grid_constant__ Call call) {                    \
    algorithm<type>(call);                                                       \
  }
#define KERNELS(algorithm)                \
  KERNEL(algorithm, float32, Float32)   \
  KERNEL(algorithm, float16, Float16)   \
  KERNEL(algorithm, bfloat16, BFloat16)

KERNELS(one_shot)
KERNELS(two_shot)
KERNELS(cube_mesh)
