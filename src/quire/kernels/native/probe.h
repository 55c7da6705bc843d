// Which instruction sets this CPU can execute.
#pragma once

namespace quire {

enum : int { PORTABLE, AVX2, AVX512, AVX512_BF16, AMX, NEON, LEVELS };

constexpr const char* LEVEL_NAMES[LEVELS] = {"portable", "avx2", "avx512", "avx512-bf16", "amx", "neon"};

// Bit n is set if level n was compiled and can run here.
unsigned available_levels();

}  // namespace quire
