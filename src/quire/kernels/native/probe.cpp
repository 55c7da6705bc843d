#include "probe.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <cstdint>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace quire {

#if defined(__x86_64__)
static uint64_t enabled_state() {  // the registers that the operating system saves when it switches threads
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static bool has(uint64_t bits, uint64_t wanted) { return (bits & wanted) == wanted; }

#if defined(__linux__) && defined(QUIRE_HAS_AMX)
// Executes AMX in a child process: some hypervisors advertise it but disable parts of it. A child of vfork shares this memory, but
// a fatal signal ends only the child.
__attribute__((noinline)) static bool amx_works() {
    alignas(64) static uint8_t shapes[64] = {1};  // palette 1, even if cpuid does not list it
    static uint8_t numbers[1024];
    for (int i = 0; i < 8; i++) shapes[16 + 2 * i] = 64, shapes[48 + i] = 16;
    pid_t child = vfork();
    if (child < 0) return false;
    if (child == 0) {
        signal(SIGILL, SIG_DFL);
        signal(SIGSEGV, SIG_DFL);
        __asm__ volatile(
            "ldtilecfg (%0)\n\t"
            "tilezero %%tmm0\n\t"
            "tileloadd (%1, %2, 1), %%tmm1\n\t"
            "tileloadd (%1, %2, 1), %%tmm2\n\t"
            "tdpbf16ps %%tmm2, %%tmm1, %%tmm0\n\t"
            "tilerelease"
            :
            : "r"(shapes), "r"(numbers), "r"((int64_t)64)
            : "memory");
        _exit(0);
    }
    int status = 0;
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static bool amx_is_permitted() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
#endif

unsigned available_levels() {
    unsigned found = 1u << PORTABLE, a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
    constexpr unsigned OSXSAVE = 1u << 27, FMA = 1u << 12, F16C = 1u << 29, AVX = 1u << 28, MOVBE = 1u << 22;
    if (!has(c, OSXSAVE | FMA | F16C | AVX | MOVBE)) return found;
    uint64_t state = enabled_state();
    if (!has(state, 0x6)) return found;
    unsigned b7, c7, d7;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return found;
    unsigned leaves_of_7 = a;
    constexpr unsigned AVX2_BIT = 1u << 5, BMI1 = 1u << 3, BMI2 = 1u << 8;
    unsigned extended = 0;
    if (__get_cpuid(0x80000001, &a, &b, &c, &d)) extended = c;
    constexpr unsigned LZCNT = 1u << 5;
    if (!has(b7, AVX2_BIT | BMI1 | BMI2) || !has(extended, LZCNT)) return found;
    found |= 1u << AVX2;
    constexpr unsigned F = 1u << 16, DQ = 1u << 17, BW = 1u << 30, VL = 1u << 31;
    if (!has(state, 0xE6) || !has(b7, F | DQ | BW | VL)) return found;
    found |= 1u << AVX512;
    constexpr unsigned VBMI = 1u << 1, BF16 = 1u << 5;
    unsigned a71 = 0;
    if (leaves_of_7 < 1 || !__get_cpuid_count(7, 1, &a71, &b, &c, &d) || !has(c7, VBMI) || !has(a71, BF16)) return found;
    found |= 1u << AVX512_BF16;
#if defined(__linux__) && defined(QUIRE_HAS_AMX)
    constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
    if (has(d7, AMX_BF16 | AMX_TILE) && has(state, 3u << 17) && amx_is_permitted() && amx_works()) found |= 1u << AMX;
#endif
    return found;
}
#elif defined(__ARM_NEON)
unsigned available_levels() { return 1u << NEON; }
#else
unsigned available_levels() { return 1u << PORTABLE; }
#endif

}  // namespace quire
