"""Configs and names of hybrid models in transformers, one file for each `model_type`."""

from mambakit.checkpoints.hub.bamba import Bamba
from mambakit.checkpoints.hub.falcon_h1 import FalconH1
from mambakit.checkpoints.hub.falcon_mamba import FalconMamba
from mambakit.checkpoints.hub.granitemoehybrid import GraniteMoeHybrid
from mambakit.checkpoints.hub.jamba import Jamba
from mambakit.checkpoints.hub.nemotron_h import NemotronH

HUB = {kind.model_type: kind for kind in (NemotronH, GraniteMoeHybrid, FalconH1, Bamba, Jamba, FalconMamba)}
