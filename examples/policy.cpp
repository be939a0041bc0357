// An agent of ppo.py without a library: reads observations, prints actions.
//
//     g++ -O2 -std=c++17 -o policy examples/policy.cpp
//     echo "0 0 0.1 0" | ./policy agents/ppo_cartpole/agent.safetensors
//
// The first 8 bytes of agent.safetensors are the length of a header in JSON, as a little-endian
// integer. The header has `dtype`, `shape` and `data_offsets` of each array, counted from its end.
// The arrays follow in C order. The first axis is the agent, and a kernel is [inputs, outputs].
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

using Array = std::vector<float>;

std::string file;
uint64_t header_size;

Array load(const std::string& name, size_t agent = 0) {
    std::string header = file.substr(8, header_size);
    size_t entry = header.find("\"params.actor.params." + name + "\"");
    size_t num_agents = std::stoull(header.substr(header.find("\"shape\":[", entry) + 9));
    size_t offsets = header.find("\"data_offsets\":[", entry) + 16;
    size_t first = std::stoull(header.substr(offsets));
    size_t last = std::stoull(header.substr(header.find(',', offsets) + 1));
    size_t size = (last - first) / num_agents;
    Array array(size / sizeof(float));
    std::memcpy(array.data(), &file[8 + header_size + first + agent * size], size);
    return array;
}

Array dense(const Array& x, const Array& kernel, Array y) {  // y begins as the bias
    for (size_t j = 0; j < x.size(); j++)
        for (size_t k = 0; k < y.size(); k++)
            y[k] += x[j] * kernel[j * y.size() + k];
    return y;
}

int main(int, char** words) {
    std::ifstream stream(words[1], std::ios::binary);
    file.assign(std::istreambuf_iterator<char>(stream), {});
    std::memcpy(&header_size, file.data(), 8);
    Array kernels[3], biases[3];
    for (int i = 0; i < 3; i++) {
        kernels[i] = load("Dense_" + std::to_string(i) + ".kernel");
        biases[i] = load("Dense_" + std::to_string(i) + ".bias");
    }
    Array obs(kernels[0].size() / biases[0].size());
    while (true) {
        for (float& number : obs)
            if (!(std::cin >> number)) return 0;
        Array x = obs;
        for (int i = 0; i < 3; i++) {
            x = dense(x, kernels[i], biases[i]);
            if (i < 2)
                for (float& number : x) number = std::tanh(number);
        }
        std::cout << std::max_element(x.begin(), x.end()) - x.begin() << std::endl;
    }
}
