"""The catalogue of policy objectives; importing it registers them.

In the formulas l = log pi - log pi_old is the log-ratio of a token, r = exp(l) with l clamped to +-20, A its
advantage, sg the stop-gradient. Every objective takes [`~trl_dro.policy_loss.PolicyLossInputs`], whose masked
positions hold zeros, so none of them deals with masks unless it reduces something. All tensors are (B, T) unless a
shape is given.
"""

from .clipped import GMPO, GSPO, SAPO, PPOClip
from .covariance import ClipCov, KLCov
from .dro import DRO
from .weighted import CISPO, DPPOKL, DPPOTV, ImportanceSampling, Reinforce


__all__ = [
    "CISPO",
    "DPPOKL",
    "DPPOTV",
    "DRO",
    "GMPO",
    "GSPO",
    "SAPO",
    "ClipCov",
    "ImportanceSampling",
    "KLCov",
    "PPOClip",
    "Reinforce",
]
