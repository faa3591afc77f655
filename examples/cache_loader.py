"""Cache values by key: whatever takes long to make and is asked for again, here or in another process."""

import torch

import stallfree as sf

calls = 0


def embed(text: str) -> torch.Tensor:
    """Stands for a model that takes long."""
    global calls
    calls += 1
    generator = torch.Generator().manual_seed(len(text))
    return torch.randn(256, generator=generator)


texts = ["a cat on a mat", "a dog in the fog", "a cat on a mat", "a bird", "a dog in the fog"]
with sf.CacheLoader(capacity="4MiB", name="example-embeddings") as cache:
    vectors = [cache.get(text, embed) for text in texts]
    print(f"{len(texts)} texts, {calls} computed; 'a bird' is cached: {'a bird' in cache}")
    print("the same text has the same vector:", torch.equal(vectors[0], vectors[2]))
    stats = cache.stats()
    print(f"{stats.hits} hits, {stats.misses} misses, {stats.resident_items} values held")
