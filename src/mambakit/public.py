"""The public names: `mambakit.X` is `X` here. A new one is imported and listed below, nowhere else."""

import mambakit.parallel as parallel
from mambakit.blocks import caches
from mambakit.blocks.attention import Attention, AttentionCache, AttentionConfig
from mambakit.blocks.mamba1 import Mamba1, Mamba1Cache, Mamba1Config
from mambakit.blocks.mamba2 import Mamba2, Mamba2Cache, Mamba2Config
from mambakit.blocks.mamba3 import Mamba3, Mamba3Cache, Mamba3Config
from mambakit.blocks.mlp import MLP, MLPConfig
from mambakit.blocks.moe import MoE, MoEConfig
from mambakit.blocks.parallel import Parallel, ParallelCache, ParallelConfig
from mambakit.blocks.param_groups import param_groups
from mambakit.blocks.tensor_only import TensorOnly
from mambakit.checkpoints import load_model, save_model
from mambakit.checkpoints.adapters import load_lora, save_lora
from mambakit.compat.hf import accelerate
from mambakit.inference.generation import generate, stream
from mambakit.inference.prefix_cache import PrefixCache
from mambakit.inference.texts import generate_text, stream_text
from mambakit.models.bidirectional import BidirectionalConfig, BidirectionalStack
from mambakit.models.language_model import LanguageModel, ModelConfig
from mambakit.models.latent_model import LatentConfig, LatentModel
from mambakit.models.layer import Layer
from mambakit.models.lora import add_lora, merge_lora
from mambakit.models.multi_gate import MultiGate, MultiGateConfig, depth_aware_bias
from mambakit.models.quantization import quantize
from mambakit.models.schedules import (
    Custom,
    Cyclic,
    Stretched,
    StridedCyclic,
    StridedStretched,
    SymmetricCyclic,
    SymmetricStretched,
)
from mambakit.models.stack import Stack, StackConfig
from mambakit.ops.backends import use_backend
from mambakit.ops.causal_conv import causal_conv
from mambakit.ops.operation import explain
from mambakit.ops.selective_scan import selective_scan
from mambakit.ops.ssd import ssd
from mambakit.ops.ssd_inputs import Mamba2SsdInput, Mamba3DoubleSsdInput, Mamba3SingleSsdInput
from mambakit.ops.ssd_path import SsdPath
from mambakit.ops.trapezoid import trapezoid
from mambakit.text.tokenizer import Tokenizer, load_tokenizer
from mambakit.training.publishing import push_to_hub
from mambakit.training.segments import run_in_segments

from_pretrained = load_model
Mamba2SsdPath = SsdPath
Mamba3SsdPath = SsdPath

__all__ = [
    "MLP",
    "Attention",
    "AttentionCache",
    "AttentionConfig",
    "BidirectionalConfig",
    "BidirectionalStack",
    "Custom",
    "Cyclic",
    "LanguageModel",
    "LatentConfig",
    "LatentModel",
    "Layer",
    "MLPConfig",
    "Mamba1",
    "Mamba1Cache",
    "Mamba1Config",
    "Mamba2",
    "Mamba2Cache",
    "Mamba2Config",
    "Mamba2SsdInput",
    "Mamba2SsdPath",
    "Mamba3",
    "Mamba3Cache",
    "Mamba3Config",
    "Mamba3DoubleSsdInput",
    "Mamba3SingleSsdInput",
    "Mamba3SsdPath",
    "MoE",
    "MoEConfig",
    "ModelConfig",
    "MultiGate",
    "MultiGateConfig",
    "Parallel",
    "ParallelCache",
    "ParallelConfig",
    "PrefixCache",
    "SsdPath",
    "Stack",
    "StackConfig",
    "Stretched",
    "StridedCyclic",
    "StridedStretched",
    "SymmetricCyclic",
    "SymmetricStretched",
    "TensorOnly",
    "Tokenizer",
    "accelerate",
    "add_lora",
    "caches",
    "causal_conv",
    "depth_aware_bias",
    "explain",
    "from_pretrained",
    "generate",
    "generate_text",
    "load_lora",
    "load_model",
    "load_tokenizer",
    "merge_lora",
    "parallel",
    "param_groups",
    "push_to_hub",
    "quantize",
    "run_in_segments",
    "save_lora",
    "save_model",
    "selective_scan",
    "ssd",
    "stream",
    "stream_text",
    "trapezoid",
    "use_backend",
]
