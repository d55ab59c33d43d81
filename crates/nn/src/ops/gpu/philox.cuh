// Random words of a counter-based generator.
#pragma once
#include "nn.cuh"

struct Word4 {
    u32 x[4];
};

// Four random words for a key and a counter (device/src/ground/random.rs).
__device__ Word4 philox(u32 key0, u32 key1, Word4 c) {
    for (u32 round = 0; round < 10; ++round) {
        u64 a = (u64)0xD2511F53u * c.x[0], b = (u64)0xCD9E8D57u * c.x[2];
        c = {{(u32)(b >> 32) ^ c.x[1] ^ key0, (u32)b, (u32)(a >> 32) ^ c.x[3] ^ key1, (u32)a}};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c;
}
