// One step of a policy as ONNX (docs/agents.md) in Node or a browser; it prints 1 for agents/ppo_cartpole.
//
//     npm install onnxruntime-web
//     node examples/policy.mjs
//
// A browser without a bundler does not find the package by its name: serve
// node_modules/onnxruntime-web/dist/ next to the page, and import
// "./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs".
import * as ort from "onnxruntime-web";

const policy = await ort.InferenceSession.create("policy.onnx");
const obs = new ort.Tensor("float32", [0.0, 0.0, 0.1, 0.0], [1, 4]);
const { action } = await policy.run({ obs });
console.log(action.data[0]);
