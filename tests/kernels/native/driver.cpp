// Calls the library of native kernels without Python, on every instruction set that it says this CPU has, and compares with plain
// float64. For emulators of other CPUs: what is advertised must run, and nothing else may be tried. Usage: driver libquire.so
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "call.h"

using namespace quire;

static uint32_t state = 1;
static float chance() { return (state = state * 1664525u + 1013904223u) / 4294967296.0f - 0.5f; }

static uint16_t bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

struct Stored {  // numbers, and how they are stored
    std::vector<double> number;
    std::vector<uint8_t> bytes;

    Stored(size_t n, int64_t type) : number(n), bytes(n * size_of(type)) {
        for (size_t i = 0; i < n; i++) {
            float x = 4 * chance();
            if (type == FP32) {
                memcpy(&bytes[4 * i], &x, 4);
            } else if (type == BF16) {
                uint16_t code = bf16(x);
                uint32_t bits = (uint32_t)code << 16;
                memcpy(&bytes[2 * i], &code, 2);
                memcpy(&x, &bits, 4);
            } else {
                bytes[i] = (uint8_t)(int8_t)(x * 30);
                x = (int8_t)bytes[i] * 0.05f;
            }
            number[i] = x;
        }
    }
};

int main(int, char** argv) {
    void* library = dlopen(argv[1], RTLD_NOW);
    if (!library) return printf("%s\n", dlerror()), 2;
    auto levels = (unsigned (*)())dlsym(library, "quire_levels");
    auto name = (const char* (*)(int))dlsym(library, "quire_level_name");
    auto attend = (int (*)(const Attend*))dlsym(library, "quire_attend");
    const int64_t heads = 2, group = 3, dim = 72, size = 16, pages = 24, width = 12;
    const std::vector<int32_t> q_lens = {1, 40, 0, 5}, kv_lens = {150, 90, 9, 5};
    std::vector<int32_t> starts = {0}, table;
    for (int32_t n : q_lens) starts.push_back(starts.back() + n);
    for (int64_t i = 0; i < 4 * width; i++) table.push_back((int32_t)((i * 7 + 3) % pages));
    const int64_t tokens = starts.back(), q_heads = heads * group;
    bool right = true;
    for (int level = 0; name(level); level++) {
        if (!(levels() >> level & 1)) continue;
        double worst = 0;
        for (int64_t type : {FP32, BF16, INT8}) {
            int64_t q_type = type == FP32 ? FP32 : BF16;
            Stored q(tokens * q_heads * dim, q_type), k(pages * size * heads * dim, type), v(pages * size * heads * dim, type);
            std::vector<uint8_t> out(tokens * q_heads * dim * size_of(q_type));
            float scale = 0.05f;
            Attend call{};
            call.q = {q.bytes.data(), q_heads * dim, dim, 1, q_type};
            call.out = {out.data(), q_heads * dim, dim, 1, q_type};
            call.tokens = tokens, call.group = group;
            Pages of_k{k.bytes.data(), size * heads * dim, dim, 0, heads * dim, dim, 1, size, dim, dim, type,
                       type == INT8 ? &scale : nullptr, 0, 0, 0};
            Pages of_v = of_k;
            of_v.data = v.bytes.data();
            call.cache = {of_k, of_v, pages, size, heads};
            call.batch = {{table.data(), width, 1, 0}, {kv_lens.data(), 1, 0, 0}, {starts.data(), 1, 0, 0}, 4, width};
            call.scale = 0.1, call.left = call.right = UNBOUNDED, call.causal = 1;
            call.context_from = 1, call.only_high = 1 << 30, call.threads = 3, call.level = level;
            if (attend(&call)) return printf("no memory\n"), 2;
            for (size_t seq = 0; seq < q_lens.size(); seq++) {
                for (int64_t t = 0; t < q_lens[seq]; t++) {
                    for (int64_t h = 0; h < q_heads; h++) {
                        int64_t row = (starts[seq] + t) * q_heads + h, seen = kv_lens[seq] - q_lens[seq] + t + 1;
                        std::vector<double> want(dim), weight(seen);
                        double total = 0;
                        auto at = [&](int64_t j) {
                            return ((table[seq * width + j / size] * size + j % size) * heads + h / group) * dim;
                        };
                        for (int64_t j = 0; j < seen; j++) {
                            double dot = 0;
                            for (int64_t d = 0; d < dim; d++) dot += q.number[row * dim + d] * k.number[at(j) + d];
                            total += weight[j] = std::exp(0.1 * dot);
                        }
                        for (int64_t j = 0; j < seen; j++) {
                            for (int64_t d = 0; d < dim; d++) want[d] += weight[j] / total * v.number[at(j) + d];
                        }
                        for (int64_t d = 0; d < dim; d++) {
                            float got;
                            if (q_type == FP32) {
                                memcpy(&got, &out[4 * (row * dim + d)], 4);
                            } else {
                                uint32_t bits = 0;
                                memcpy((char*)&bits + 2, &out[2 * (row * dim + d)], 2);
                                memcpy(&got, &bits, 4);
                            }
                            double error = std::fabs(got - want[d]) / (type == FP32 ? 1e-5 : 3e-2);
                            if (!(error <= worst)) worst = error;
                        }
                    }
                }
            }
        }
        printf("%s: %s (%.2f of what is allowed)\n", name(level), worst <= 1 ? "right" : "WRONG", worst);
        right = right && worst <= 1;
    }
    return right ? 0 : 1;
}
