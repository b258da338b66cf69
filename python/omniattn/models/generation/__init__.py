"""Token generation: greedy, sampled or by beams, as a whole or as a stream, with drafted tokens."""

from omniattn.models.generation.generate import generate, stream
from omniattn.models.generation.protocol import Generator
from omniattn.models.generation.sampling import sample

__all__ = ["Generator", "generate", "sample", "stream"]
