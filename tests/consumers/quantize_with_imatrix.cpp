// llama-quantize --imatrix, in short: llama.cpp's own reader of importance matrices, and its own quantization.
// usage: quantize_with_imatrix IMATRIX IN.gguf OUT.gguf FTYPE
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "llama.h"

// common/imatrix-loader.h of the same version, which is not installed with the library.
struct common_imatrix_entry {
    std::vector<float> sums;
    std::vector<int64_t> counts;
};

struct common_imatrix {
    std::map<std::string, common_imatrix_entry> entries;
    std::vector<std::string> datasets;
    int32_t chunk_count = 0;
    int32_t chunk_size = 0;
    unsigned char flags[64] = {};  // of the reader's own, which differ between versions
};

bool common_imatrix_load(const std::string & file, common_imatrix & imatrix);

int main(int, char ** argv) {
    common_imatrix read;
    if (!common_imatrix_load(argv[1], read)) return 1;
    std::map<std::string, std::vector<float>> means;
    for (const auto & [name, entry] : read.entries) {
        const size_t width = entry.sums.size() / entry.counts.size();
        for (size_t i = 0; i < entry.sums.size(); ++i) {
            const int64_t count = entry.counts[i / width];
            means[name].push_back(count > 0 ? entry.sums[i] / count : 1.0f);
        }
    }
    std::vector<llama_model_imatrix_data> data;
    for (const auto & [name, values] : means) data.push_back({name.c_str(), values.data(), values.size()});
    data.push_back({nullptr, nullptr, 0});
    llama_model_quantize_params settings = llama_model_quantize_default_params();
    settings.ftype = (llama_ftype) std::atoi(argv[4]);
    settings.nthread = 1;
    settings.allow_requantize = true;  // the embedding of a file that we write is quantized
    settings.imatrix = data.data();
    std::printf("%zu entries, %d chunks of %d\n", read.entries.size(), read.chunk_count, read.chunk_size);
    return (int) llama_model_quantize(argv[2], argv[3], &settings);
}
