// Types of the loops that are compiled once per instruction set. Part of kernels_isa.cpp and of
// codes_isa.cpp.

// Not __restrict, because the result may lie exactly where an operand lies.
#if defined(__clang__)
#define UNISONO_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define UNISONO_INDEPENDENT _Pragma("GCC ivdep")
#endif

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;
static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "64-bit platforms");

// An element in memory: at any address, and the bytes may also be used as another type.
template <class T>
struct [[gnu::packed, gnu::may_alias]] Stored {
  T value;
};
