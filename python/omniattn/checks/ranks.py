"""Whether the tokens of calls are split over ranks, for layers."""

from omniattn.ops._ranks import ACTIVE as ACTIVE
from omniattn.ops._ranks import Region as Region
