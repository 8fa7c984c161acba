"""The constants of the control of drafting in one place, which simulations and tests vary."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """One constant a line: its value, its unit where it has one, and its meaning."""

    # Choices
    depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)  # tokens to compare
    horizon: int = 128  # most tokens over which the cost of reading missed tokens is spread
    falls: int = 2  # depths in a row, each slower than the last, that end a method's search
    hopeless_speed: float = 0.8  # of the best speed so far; below it longer drafts are skipped
    enter_speedup: float = 1.04  # expected over plain decoding, above which drafting begins
    stay_speedup: float = 1.01  # the same, above which drafting continues
    better_speedup: float = 1.01  # over the present choices, above which others replace them
    doubt: float = 0.25  # speedup that an untried method must promise beyond ``enter_speedup``
    sure_tokens: float = 48.0  # judged tokens over which ``doubt`` falls to zero
    max_level: int = 4  # largest power of two of odds by which sequences are distinguished
    max_groups: int = 12  # groups beyond which sequences of a workload are not distinguished
    max_freedoms: int = 256  # different wishes of requests that are remembered

    # Reviews
    review_steps: int = 16  # steps after which choices are compared again in a batch that stays
    most_review_steps: int = 192  # the same, at most, where comparing takes long
    changed_reviews: int = 4  # times sooner if the batch has changed by more than a quarter
    lasting_steps: int = 3  # for which a batch must stay halved before choices are compared again
    vain_steps: int = 4  # in a row without an accepted token, after which a review comes sooner
    first_reviewed_steps: int = 16  # that are each reviewed while drafts are used
    first_review_steps: int = 4  # between the first two reviews if nothing is drafted

    # Trials
    alone_share: float = 0.008  # of one stream's time that trials may take
    together_share: float = 0.005  # of several streams' time that trials may take
    sequences_per_trier: int = 16  # one sequence of this many tries unused methods
    first_trials: int = 6  # that make a drafter known; no time needs to be saved up for them
    first_steps: float = 64.0  # most time of reading before such a trial, in plain steps
    hopeless_steps: int = 1024  # between two trials of a method that is slower even if underrated
    patience_steps: int = 128  # within which the time for a trial by all must be saved up
    trial_steps: int = 2  # in a row that try a method; costs are not learned from the first
    trial_depth: int = 3  # tokens of a draft in a trial
    known_trials: int = 8  # of each unused method before a longer draft of a used one is tried
    longer_gain: float = 1.2  # times as many tokens per step, above which a longer draft is tried
    promised_gain: float = 1.5  # tokens per step above which a lookup is tried, whatever its cost
    near_speed: float = 0.7  # of plain decoding over drafting, above which plain steps are frequent
    plain_steps: int = 48  # after which a plain step is tried if drafting gains little
    sure_steps: int = 192  # after which a plain step is tried if drafting gains much
    least_price: float = 0.02  # least cost of a trial of plain decoding, in plain steps

    # Pauses
    lost_steps: float = 1.0  # plain steps that drafting may lose before it pauses
    luck_steps: float = 3.0  # more of them for one stream; n streams have 1 / sqrt(n) of that
    half_open: float = 0.75  # of the allowed loss that still counts as lost after a pause
    first_pause: int = 192  # steps without drafts after drafting lost
    longest_pause: int = 1024  # steps; a pause doubles each time that drafting loses again
    renewing_steps: int = 4  # of a pause between two looks at new sequences
    renewing_tokens: float = 6.0  # judged tokens that a new sequence needs to count against a pause
    renewing_rate: float = 0.6  # of them that must be accepted
    renewing_share: float = 0.25  # of all sequences; if more are such ones, the pause ends

    # Prices
    together_price: float = 1.2  # times what a batch of several emits, that a row must bring
    sure_chance: float = 0.9  # P(accepted) above which a node is extended whatever that costs
    tiny_chance: float = 1e-6  # by which the price of a row exceeds the likeliest node that is cut
    cuts: tuple[int, ...] = (  # nodes of a step to compare
        0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128,
        160, 192, 224, 256, 320, 384, 448, 512,
    )  # fmt: skip

    # Looks
    own_share: float = 0.002  # of the time that looks may take, and as much for reviews
    own_seconds: float = 1e-4  # most s per step for each of them
    most_look_steps: int = 24  # steps of which at least one is looked at
    new_drafts: int = 32  # first drafts of a method, whose steps are all looked at
    new_drafts_at_once: int = 4  # of one step that count as new, so that several steps are used
    scored_sequences: int = 12  # most sequences whose drafts are scored in a step; they take turns
    most_shadow_steps: int = 64  # most steps until known methods get shadows again
    shadow_share: float = 0.01  # of the time that shadows may take until their methods are known
    shadowed_sequences: int = 4  # most sequences that get a shadow at a time; they take turns
    shadow_depth: int = 4  # tokens of a draft that is scored without being verified

    # Survival
    decay: float = 1 - 1 / 64  # what a count keeps of its weight with each newer one
    prior_weight: float = 8.0  # observations that a method's prior counts for
    shrinkage: float = 6.0  # observations that a more general estimate counts for
    own_shrinkage: float = 16.0  # observations that a workload's estimate counts for a sequence
    max_workloads: int = 64  # pairs of a method and a workload that are remembered
    max_sequences: int = 4096  # pairs of a method and a sequence that are remembered
    memory_drafts: int = 128  # of a sequence, after which older ones count half
    default_prior: float = 0.5  # P(accept) of a method without a prior of its own
    siblings_share: float = 0.4  # of refused tokens for which a tree's siblings are right
    second_share: float = 0.1  # of refused tokens for which another drafter is right

    # Costs
    smoothing: float = 0.1  # weight of the newest value in a running mean
    ratio_smoothing: float = 0.05  # weight of the newest ratio of measured to expected seconds
    machine_smoothing: float = 0.1  # the same for the ratio of all sizes, the machine's speed
    pull: float = 4.0  # measurements at which a size's own ratio weighs as much as that of all
    spike: float = 1.5  # factor around the mean within which measurements are kept
    least_ratio: float = 0.01  # of measured to expected seconds
    trusted: int = 4  # measurements before spikes are cut
    freshness: float = 0.98  # what a ratio keeps of its weight with each forward that is measured
    read_tokens: int = 256  # that a drafter reads at once if it has missed many
    host: float = 1e-4  # s of a step outside its forwards, before that is measured
    host_per_sequence: float = 2e-5  # s more for each sequence
    call: float = 2e-5  # s of a drafter without a model in a step
    per_sequence: float = 5e-6  # s more for each sequence
    fewest_chunk_rows: int = 16  # of a prompt beside streams, so that prompts make progress
    counted_rows: int = 32  # least prompt rows of a step from which a row's cost is learned
    stall_seconds: float = 0.02  # most s that running streams wait for a chunk, or
    stall_steps: float = 2.0  # this many of their own steps, if that is longer

    def doubted(self, judged: float) -> float:
        """Return the extra speedup required of a method with ``judged`` judged tokens."""
        return self.doubt * max(0.0, 1 - judged / self.sure_tokens)


USUAL = Tuning()  # the constants of an engine
