"""The constants of the control of drafting in one place, which simulations and tests vary."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """One constant a line: its value, its unit where it has one, and its meaning."""

    # Choices
    depths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)  # tokens, compared
    horizon: int = 128  # tokens over which a drafter's reading of what it missed is spread, at most
    falls: int = 2  # depths in a row, each slower than the last, that end the search of a method
    hopeless_speed: float = 0.8  # of the best speed so far: below, longer drafts are not compared
    enter_speedup: float = 1.04  # expected over plain decoding, from which on drafting begins
    stay_speedup: float = 1.01  # the same, from which on drafting goes on
    better_speedup: float = 1.01  # over the present choices, from which on others replace them
    doubt: float = 0.25  # speedup that an untried method must promise beyond ``enter_speedup``
    sure_tokens: float = 48.0  # judged tokens over which ``doubt`` falls to zero
    max_level: int = 4  # power of two of their odds up to which sequences are told apart
    max_groups: int = 12  # groups beyond which sequences of a workload are not told apart
    max_freedoms: int = 256  # wishes of requests that are remembered

    # Reviews
    review_steps: int = 16  # steps after which choices are compared again in a batch that stays
    most_review_steps: int = 192  # the same, at most, where comparing takes long
    changed_reviews: int = 4  # times sooner after the batch has changed by a quarter
    lasting_steps: int = 3  # that a batch must be half as large before choices are compared again
    vain_steps: int = 4  # in a row without an accepted token, after which a review comes sooner
    first_reviewed_steps: int = 16  # that are reviewed one by one while drafts are used
    first_review_steps: int = 4  # between the first two reviews where nothing is drafted

    # Trials
    alone_share: float = 0.008  # of the time of one stream that trials may take
    together_share: float = 0.005  # of the time of several streams that trials may take
    sequences_per_trier: int = 16  # one sequence of so many tries what nobody uses
    first_trials: int = 6  # that make a drafter known, for which no time needs to be saved up
    first_steps: float = 64.0  # plain steps that a drafter reads for before such a trial, at most
    hopeless_steps: int = 1024  # between two trials of a method that is slower even if underrated
    patience_steps: int = 128  # within which the time for a trial of all must be saved up
    trial_steps: int = 2  # in a row that try a method; the first tells no costs
    trial_depth: int = 3  # tokens of the draft of a method that is tried
    known_trials: int = 8  # of each unused method before a longer draft of one in use is tried
    longer_gain: float = 1.2  # on the tokens of a step that makes a longer draft worth trying
    promised_gain: float = 1.5  # on a step's tokens for which a lookup is tried, whatever it costs
    near_speed: float = 0.7  # of plain decoding over drafts, from which on plain steps are frequent
    plain_steps: int = 48  # after which a plain step is tried where drafts win little
    sure_steps: int = 192  # after which a plain step is tried where drafts win much
    least_price: float = 0.02  # of a plain step that a trial of it costs at least

    # Pauses
    lost_steps: float = 1.0  # plain steps that drafting may lose before it pauses
    luck_steps: float = 3.0  # more of them for one stream; n streams have 1 / sqrt(n) of it
    half_open: float = 0.75  # of the allowed loss that counts as lost after a pause
    first_pause: int = 192  # steps without drafts after drafting lost
    longest_pause: int = 1024  # steps; a pause doubles each time that drafting loses again
    renewing_steps: int = 4  # of a pause, after which new sequences are looked at
    renewing_tokens: float = 6.0  # of a new sequence that must be judged to end a pause
    renewing_rate: float = 0.6  # of them that must be accepted
    renewing_share: float = 0.25  # of all sequences that such ones must exceed

    # Prices
    together_price: float = 1.2  # of what a batch of several emits, that a row must bring
    sure_chance: float = 0.9  # of acceptance, from which on a node is drafted whatever it costs
    tiny_chance: float = 1e-6  # by which the price of a row lies above the likeliest node cut
    cuts: tuple[int, ...] = (  # nodes of a step, compared
        0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128,
        160, 192, 224, 256, 320, 384, 448, 512,
    )  # fmt: skip

    # Looks
    own_share: float = 0.002  # of the time that looks may take, and that reviews may take
    own_seconds: float = 1e-4  # s of a step that each of them may take at most
    most_look_steps: int = 24  # steps of which at least one is looked at
    new_drafts: int = 32  # drafts of a method whose steps are all looked at
    new_drafts_at_once: int = 4  # of one step that count as new, so that several steps tell a cost
    scored_sequences: int = 12  # whose drafts are scored in a step, at most; they take turns
    most_shadow_steps: int = 64  # after which known methods get shadows again, at most
    shadow_share: float = 0.01  # of the time that shadows may take until their methods are known
    shadowed_sequences: int = 4  # that get a shadow at a time, at most; they take turns
    shadow_depth: int = 4  # tokens of a draft that is scored without being verified

    # Survival
    decay: float = 1 - 1 / 64  # what a count keeps of its weight with each newer one
    prior_weight: float = 8.0  # observations that a method's prior counts for
    shrinkage: float = 6.0  # own observations that outweigh a more general estimate
    own_shrinkage: float = 16.0  # the same of a sequence, over its workload's estimate
    max_workloads: int = 64  # by method, that are remembered
    max_sequences: int = 4096  # by method, that are remembered
    memory_drafts: int = 128  # of a sequence after which older ones count half
    default_prior: float = 0.5  # P(accept) of a method that nothing is known of
    siblings_share: float = 0.4  # of refused tokens for which a tree's siblings are right
    second_share: float = 0.1  # of refused tokens for which another drafter is right

    # Costs
    smoothing: float = 0.1  # weight of the newest value in a running mean
    ratio_smoothing: float = 0.05  # weight of the newest ratio of measured to expected seconds
    machine_smoothing: float = 0.1  # the same of ratios that tell how fast the machine is
    pull: float = 4.0  # measurements that a size needs before its own weigh as all sizes'
    spike: float = 1.5  # times the expected that a measurement counts as at most, and inversely
    least_ratio: float = 0.01  # of measured to expected seconds
    trusted: int = 4  # measurements before spikes are cut
    freshness: float = 0.98  # what a ratio keeps of its weight with each forward that is measured
    read_tokens: int = 256  # that a drafter reads at once where it has missed many
    host: float = 1e-4  # s of a step beside its forwards, before they are measured
    host_per_sequence: float = 2e-5  # s more for each sequence
    call: float = 2e-5  # s of a drafter without a model in a step
    per_sequence: float = 5e-6  # s more for each sequence
    fewest_chunk_rows: int = 16  # of a prompt beside streams, so that prompts make progress
    counted_rows: int = 32  # of prompts in a step, from which on it tells what a row costs
    stall_seconds: float = 0.02  # s that running streams wait for a chunk at most, or
    stall_steps: float = 2.0  # their own steps' time, if that is longer

    def doubted(self, judged: float) -> float:
        """Return the speedup by which a method of which so many tokens were judged is doubted."""
        return self.doubt * max(0.0, 1 - judged / self.sure_tokens)


USUAL = Tuning()  # the constants of an engine
