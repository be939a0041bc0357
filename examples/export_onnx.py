"""Write the greedy policy of an agent as ONNX, with jax2onnx.

    pip install -c constraints.txt -e ".[export]"
    pip install --no-deps jax2onnx==0.17.1
    python examples/export_onnx.py agents/ppo_cartpole 0 cartpole.onnx

Tried with jax2onnx 0.17.1, onnx 1.23.2 and ONNX Runtime 1.32.0: the agent of CartPole took the same
actions at 64 random observations. The requirements of jax2onnx would replace orbax-checkpoint,
hence --no-deps. Before you use a model, check that ONNX Runtime returns the same actions as `act`.
jax2onnx mistakes the batch axis of a GRU, which needs shapes with a batch of one, and it cannot
convert a search that draws random numbers (alphazero.py with `eval_simulations` above 0).
"""

import logging
import sys

import jax
import jax2onnx
import onnx
from export_policy import batched_policy

import onejit

logging.getLogger("jax2onnx").setLevel(logging.ERROR)  # it warns of packages that its examples need

run_dir, number, file = sys.argv[1:]
script, config, agents = onejit.load_run(run_dir)
agent = jax.tree.map(lambda leaf: leaf[int(number)], agents)
act, shapes = batched_policy(script, config, agent)
traced = jax.make_jaxpr(act)(*shapes)  # before jax2onnx replaces functions of Flax
model = jax2onnx.to_onnx(
    jax.extend.core.jaxpr_as_fun(traced), shapes, model_name="policy", opset=21
)
del model.graph.value_info[:]  # shapes inside, of which some are wrong
onnx.save(model, file)
