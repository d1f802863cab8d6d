"""The static tree with the best expected tokens per second, from measured acceptance and costs.

After Sequoia (arXiv 2402.12374): the child of rank r at depth d is the target's token with a probability that depends
on (d, r) alone, so that a node is reached with the product of those on its path, and a tree yields one token and the
sum over its nodes. For a bound on the depth the best n nodes are then simply the n likeliest: a node is never likelier
than its parent or its elder sibling. Every number of nodes and bound on the depth is tried, so the result is the best
of all trees.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# ms of a whole speculative step with a tree of (draft nodes, levels)
StepCost = Callable[[int, int], float]


@dataclass(frozen=True)
class BestTree:
    """Attributes:
    parents: of `Tree.from_parents`; only the root where no tree beats it.
    tokens_per_step: expected, the bonus token included.
    step_ms: by the given cost.
    """

    parents: list[int]
    tokens_per_step: float
    step_ms: float

    @property
    def tokens_per_ms(self) -> float:
        return self.tokens_per_step / self.step_ms


def best_tree(acceptance: Sequence[Sequence[float]], cost: StepCost, max_nodes: int = 64) -> BestTree:
    """The best static tree of one draft node or more, at most `max_nodes`.

    Args:
        acceptance: [depth - 1][rank], probabilities that do not increase with the rank.
    """
    best: BestTree | None = None
    for levels in range(1, len(acceptance) + 1):
        # (-probability, order, parent, depth, rank, probability of the parent)
        heap = [(-acceptance[0][0], 0, 0, 1, 0, 1.0)]
        parents, tokens, depth_used = [-1], 1.0, 0
        while heap and len(parents) <= max_nodes:
            negative, _, parent, depth, rank, above = heapq.heappop(heap)
            if negative == 0 and len(parents) > 1:
                break
            node = len(parents)
            parents.append(parent)
            tokens -= negative
            depth_used = max(depth_used, depth)
            if rank + 1 < len(acceptance[depth - 1]):
                chance = above * acceptance[depth - 1][rank + 1]
                heapq.heappush(heap, (-chance, 2 * node, parent, depth, rank + 1, above))
            if depth < levels:
                heapq.heappush(heap, (negative * acceptance[depth][0], 2 * node + 1, node, depth + 1, 0, -negative))
            found = BestTree(list(parents), tokens, cost(node, depth_used))
            if best is None or found.tokens_per_ms > best.tokens_per_ms:
                best = found
    assert best is not None, "acceptance without a depth"
    return best


def expected_tokens(parents: Sequence[int], acceptance: Sequence[Sequence[float]]) -> float:
    """Tokens per step of a tree, the bonus token included."""
    chance, depth, ranks = [1.0], [0], [0] * len(parents)
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
        chance.append(chance[parent] * acceptance[depth[-1] - 1][ranks[parent]])
        ranks[parent] += 1
    return sum(chance)


def decreasing(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The values made non-increasing by pooling neighbours that are not (weighted isotonic regression)."""
    pools: list[list[float]] = []  # mean, weight, count
    for value, weight in zip(values, weights, strict=True):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-1][0] > pools[-2][0]:
            (m2, w2, c2), (m1, w1, c1) = pools.pop(), pools.pop()
            total = w1 + w2
            pools.append([(m1 * w1 + m2 * w2) / total if total else max(m1, m2), total, c1 + c2])
    return [mean for mean, _, count in pools for _ in range(int(count))]
