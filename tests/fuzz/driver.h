// Where there is no libFuzzer: feeds a target the same random inputs in every run.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// usage: <target> <seconds> <seed>; prints the number of inputs. `shape(bytes, random)` may change an input first.
template <class Shape>
static int drive(int argc, char** argv, size_t max_bytes, Shape shape) {
    const double seconds = argc > 1 ? atof(argv[1]) : 5.0;
    uint64_t state = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
    auto random = [&]() {  // splitmix64
        uint64_t z = (state += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    };
    const time_t end = time(nullptr) + (time_t)(seconds + 0.5);
    long n_runs = 0;
    for (; time(nullptr) < end; ++n_runs) {
        std::vector<uint8_t> bytes(random() % max_bytes);
        for (uint8_t& b : bytes) b = (uint8_t)(random() >> 32);
        shape(bytes, random);
        LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    }
    printf("%ld inputs, no finding\n", n_runs);
    return 0;
}
