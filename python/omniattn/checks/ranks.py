"""Whether the tokens of calls are split over ranks, for layers."""

from omniattn.ops.dispatch.ranks import ACTIVE as ACTIVE
from omniattn.ops.dispatch.ranks import Region as Region
