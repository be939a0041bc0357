// A policy as ONNX (docs/agents.md) in ONNX Runtime: reads observations, prints actions.
// Unpack ONNX Runtime's release for your machine as the folder onnxruntime.
//
//     g++ -O2 -std=c++17 -I onnxruntime/include -o policy examples/policy_onnx.cpp
//         -L onnxruntime/lib -lonnxruntime
//     echo "0 0 0.1 0" | LD_LIBRARY_PATH=onnxruntime/lib ./policy policy.onnx
#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <iostream>
#include <vector>

int main(int, char** words) {
    Ort::Env env;
    Ort::Session policy(env, words[1], Ort::SessionOptions());
    const char* inputs[] = {"obs"};
    const char* outputs[] = {"action"};
    int64_t size = policy.GetInputTypeInfo(0).GetTensorTypeAndShapeInfo().GetShape()[1];
    std::vector<float> obs(size);
    std::vector<int64_t> shape = {1, size};
    auto cpu = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    auto tensor = Ort::Value::CreateTensor<float>(cpu, obs.data(), obs.size(), shape.data(), shape.size());
    while (true) {
        for (float& number : obs)
            if (!(std::cin >> number)) return 0;
        auto results = policy.Run(Ort::RunOptions(), inputs, &tensor, 1, outputs, 1);
        std::cout << *results[0].GetTensorData<int32_t>() << std::endl;
    }
}
