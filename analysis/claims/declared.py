"""The claims, declared: what is claimed, where, on what, and what decides it here."""

from analysis.ablations import ABLATIONS, BASE, CANDIDATE, NARROW
from analysis.claims import measures as m
from analysis.claims.rules import BUDGETS, MIDDLE, Claim, Rule
from analysis.schema import LEAST_L
from analysis.statistics import recall
from analysis.wording import percent

CRITICALKV = "CriticalKV, arXiv 2502.03805"
BEHAVIOUR = "Behaviour-preserving eviction, arXiv 2610.06479"
OURS = "criticalkv, docs/theory.md"
OPEN = "open question of both papers"
LLAMA = "Llama-3.1-8B, first decoded token, MultiNews, 20 % cache (second-hand)"
FIRST = f"{MIDDLE}, first decoded token (the paper's protocol)"
ALONE = f"{MIDDLE}, the prompt's last query, each query head by itself, no pooling, nothing always kept"
WITHOUT = "criticalkv validate{run} --leave-one-out 128"
TIMED = "criticalkv validate{run} --full"
ZERO = f"{CANDIDATE}:epsilon=0"
STUDIED = tuple(budget for budget in ABLATIONS["budget"].budgets or () if budget <= m.LARGE)
"""The paper's budgets, 2.5 to 40 %."""
PLAIN = (f"{CANDIDATE}:pooling=none", f"{BASE}:pooling=none")


def ablate(name: str) -> str:
    """The command of an ablation."""
    return f"criticalkv ablate {name}{{run}}"


CLAIMS = (
    Claim(
        "C1", "After stage 1 alone, half of the free budget, σ > ½ in more than 99 % of heads",
        f"{CRITICALKV}, Assumption 3.4", "α = 0.5, all heads", "> 99 % of heads",
        f"{FIRST}; the window and the query's own entry count as kept", "share of heads", Rule("above", 0.99), m.column("stage1_share"),
    ),
    Claim(
        "C1.window", "C1 for the window's queries, which chose", CRITICALKV, "", None,
        f"{MIDDLE}, the window's queries", "share of heads", Rule("above", 0.99), m.column("stage1_share", queries="window"),
    ),
    Claim(
        "C1.later", "C1 for the tokens decoded after the first", CRITICALKV, "", None,
        f"{MIDDLE}, later tokens", "share of heads", Rule("above", 0.99), m.column("stage1_share", queries="later"),
    ),
    Claim(
        "C1.kept", "With all that is kept, σ > ½ in more than 99 % of heads", CRITICALKV, "", None,
        FIRST, "share of heads", Rule("above", 0.99), m.column("retained_share"),
    ),
    Claim(
        "C2", "Two-stage selection lowers the L1 perturbation of most heads",
        f"{CRITICALKV}, head map", LLAMA, "92 % of heads (Mistral 86 %), second-hand",
        FIRST, "share of heads improved", Rule("above", 0.5), m.improved(),
    ),
    Claim(
        "C2.epsilon", "C2 with ε = 0", CRITICALKV, "", None,
        FIRST, "share of heads improved", Rule("above", 0.5), m.improved(ZERO), ablate("epsilon"),
    ),
    Claim(
        "C2.unpooled", "C2 without pooling", CRITICALKV, "", None,
        FIRST, "share of heads improved", Rule("above", 0.5), m.improved(*PLAIN), ablate("pooling"),
    ),
    Claim(
        "C2.later", "C2 for the tokens decoded after the first", CRITICALKV, "", None,
        f"{MIDDLE}, later tokens", "share of heads improved", Rule("above", 0.5), m.improved(queries="later"),
    ),
    Claim(
        "C2.alone", "C2 in the theorem's own setting", CRITICALKV, "", None,
        ALONE, "share of heads improved", Rule("above", 0.5), m.single_improved("two-stage"),
    ),
    Claim(
        "C2.sum", "Two-stage selection lowers the sum of L over all heads", CRITICALKV, "", None,
        FIRST, "change of ΣL", Rule("below", 0), m.total_change(),
    ),
    Claim(
        "C3", "At the last layer the hidden state lies nearer to the full cache's",
        f"{CRITICALKV}, layer curve", LLAMA, "lower, near zero at the last layer (second-hand)",
        f"{FIRST}, a real forward pass with every layer evicted", "change of the drift", Rule("below", 0), m.drift_change(),
    ),
    Claim(
        "C3.grows", "The gain accumulates: it is larger in the last third of the layers than in the first",
        f"{CRITICALKV}, layer curve", LLAMA, None,
        f"{FIRST}, a real forward pass with every layer evicted",
        "difference of the drift's changes", Rule("below", 0), m.drift_growth(),
    ),
    Claim(
        "C4", "The sum of L is lower at every budget from 2.5 to 40 %, also where two-stage selection does worst",
        f"{CRITICALKV}, budget curve", "2.5 to 40 % cache", "consistently lower",
        f"{', '.join(map(percent, STUDIED))} cache, with window {NARROW} in its place, first decoded token; the largest of "
        "their means, with an interval that holds for it",
        "largest change of ΣL", Rule("below", 0), m.worst_budget(STUDIED), ablate("budget"),
    ),
    Claim(
        "C5", "α hardly matters: ΣL differs by less than 5 % over α in {0.25, 0.5, 0.75}",
        f"{CRITICALKV}, ablation", "task scores at α in {0.25, 0.5, 0.75}", "stable",
        FIRST, "spread of ΣL", Rule("below", 0.05), m.alpha_spread(), ablate("alpha"),
    ),
    Claim(
        "C5.one-stage", "One stage (α = 0) perturbs more than two",
        f"{CRITICALKV}, ablation", "task scores, α = 0 against 0.5", "44.35 against 43.77 on Llama, 31.94 against 42.85 on Mistral",
        FIRST, "change of ΣL", Rule("above", 0), m.total_change(f"{CANDIDATE}:alpha=0", f"{CANDIDATE}:alpha=0.5"), ablate("alpha"),
    ),
    Claim(
        "C6", "L2 in place of L1 gives a similar gain, within 5 % of the heads",
        f"{CRITICALKV}, appendix", "", "similar",
        f"{FIRST}, L judged in L1", "difference of the shares", Rule("within", 0.05),
        m.difference(m.improved(f"{CANDIDATE}:norm=2"), m.improved(f"{CANDIDATE}:norm=1")), ablate("norm"),
    ),
    Claim(
        "C7", "SnapKV: two-stage selection more than halves the loss on RULER at 40 % cache",
        f"{CRITICALKV}, RULER", "Llama-3.1-8B, 40 % cache, full 91.05", "67.93 to 76.89: ratio 0.61",
        "RULER's tasks, 40 % cache", "ratio of losses", Rule("below", 0.5), m.loss_ratio(["snapkv"]), TIMED, over="ruler",
    ),
    Claim(
        "C7.adakv", "C7 for AdaKV",
        f"{CRITICALKV}, RULER", "Llama-3.1-8B, 40 % cache, full 91.05", "78.38 to 86.28: ratio 0.38",
        "RULER's tasks, 40 % cache", "ratio of losses", Rule("below", 0.5), m.loss_ratio(["adakv"]), TIMED, over="ruler",
    ),
    Claim(
        "C7.headkv", "C7 for HeadKV",
        f"{CRITICALKV}, RULER", "Llama-3.1-8B, 40 % cache, full 91.05", "79.98 to 89.29: ratio 0.16",
        "RULER's tasks, 40 % cache, head scores of this model", "ratio of losses", Rule("below", 0.5),
        m.loss_ratio(["headkv"]),
        TIMED, over="ruler",
    ),
    Claim(
        "C8", "The loss is more than halved on other models too, SnapKV and AdaKV together",
        f"{CRITICALKV}, RULER", "Mistral and Qwen2.5-32B, 40 % cache",
        "Mistral AdaKV 34.88 to 69.17; Qwen2.5-32B HeadKV loss 13.7 % to 3.4 %",
        "RULER's tasks, 40 % cache, on this one model", "ratio of losses", Rule("below", 0.5),
        m.loss_ratio(["snapkv", "adakv"]), TIMED, over="ruler",
    ),
    Claim(
        "C9", "On LongBench two-stage selection scores higher in most of the cases that differ",
        f"{CRITICALKV}, LongBench", "20 and 40 % cache", "better in 88 of 90 cases",
        "LongBench's tasks, 20 and 40 % cache; read from the hub", "share of cases", Rule("above", 0.5), m.long_bench(),
        "criticalkv evaluate{model} --task longbench --budgets 0.2,0.4 --policies snapkv,snapkv+two-stage,adakv,adakv+two-stage "
        "--out runs/longbench; criticalkv validate{run} --answers runs/longbench", over="longbench",
    ),
    Claim(
        "C10", "Two-stage selection delays the first token by less than 5 %",
        f"{CRITICALKV}, efficiency", "32K tokens, batch 1, one GPU", "3.54 s to 3.60 s: +1.7 %",
        f"{MIDDLE}, against attention-only selection",
        "change of the time", Rule("below", 0.05), m.seconds(CANDIDATE, BASE, what="first_token_s"), TIMED,
    ),
    Claim(
        "C10.decoding", "Decoding is as fast (within 5 %)",
        f"{CRITICALKV}, efficiency", "32K tokens, batch 1, one GPU", "unchanged",
        f"{MIDDLE}, against attention-only selection",
        "change of the time", Rule("within", 0.05), m.seconds(CANDIDATE, BASE, what="token_s"), TIMED,
    ),
    Claim(
        "B1", "Ranked by the KL of removals, what is kept at up to 10 % cache changes the next tokens less than SnapKV's choice",
        BEHAVIOUR, "5 to 10 % cache", None,
        f"fisher, one ranking over the model; mean over the budgets up to 10 % of {BUDGETS}",
        "change of the KL", Rule("below", 0), m.kl_change("fisher", BASE, most=m.SMALL), needs=("fisher",),
    ),
    Claim(
        "B2", "That gain is larger at up to 10 % cache than at 40 %",
        BEHAVIOUR, "5 to 10 % cache", None,
        f"fisher against SnapKV; means over the budgets up to 10 %, and of 40 % and more, of {BUDGETS}",
        "difference of the KL's changes", Rule("below", 0),
        m.difference(m.kl_change("fisher", BASE, most=m.SMALL), m.kl_change("fisher", BASE, least=m.LARGE)), needs=("fisher",),
    ),
    Claim(
        "B3", "Carried to the logits with all later layers taken as the identity, a removal's KL ranks entries better than attention",
        BEHAVIOUR, "", None,
        "against exact leave-one-out KL in float64, the last query, five layers", "difference of Spearman's ρ", Rule("above", 0),
        m.difference(m.rank("straight_through"), m.rank("attention")), WITHOUT,
    ),
    Claim(
        "B4", "Slower while compressing than attention heuristics",
        BEHAVIOUR, "", None, f"{MIDDLE}, fisher against SnapKV",
        "change of the time", Rule("above", 0), m.seconds("fisher", BASE, what="first_token_s"), TIMED, needs=("fisher",),
    ),
    Claim(
        "B5", "Faster from end to end than the full cache",
        BEHAVIOUR, "", None, f"{MIDDLE}, fisher, the prompt and 33 tokens",
        "change of the time", Rule("below", 0), m.seconds("fisher", "full", what="both"), TIMED, needs=("fisher",),
    ),
    Claim(
        "O1", "L ≤ θ_ô ≤ θ for every query and choice",
        f"{OURS} B1, C2", "", None, "L ≤ θ for all choices, budgets and queries of the run; θ_ô for single heads under each rule",
        "violations", Rule("exactly", 0), m.violations(),
    ),
    Claim(
        "O2", "θ_ô is tighter than θ by more than a quarter",
        f"{OURS} C2", "4 contexts of 1,024 tokens", "2.6 L against 4.1 L", ALONE,
        "median θ_ô / θ", Rule("below", 0.75), m.single_median("theta_o_hat", "theta"),
    ),
    Claim(
        "O3", "The Fisher score ranks entries as exact leave-one-out does",
        f"{OURS} K4", "160 to 512 tokens", "0.990", "exact KL in float64, the last query, five layers, all entries",
        "Spearman's ρ", Rule("above", 0.98),
        m.rank("fisher"), WITHOUT,
    ),
    Claim(
        "O3.recall", "It finds more than 90 % of the 20 % of entries that matter most",
        f"{OURS} K4", "160 to 512 tokens", "0.951", "exact KL in float64, the last query, five layers, all entries",
        "recall of the top 20 %", Rule("above", 0.9),
        m.rank("fisher", recall), WITHOUT,
    ),
    Claim(
        "O3.rival", "It ranks better than the exact error of the attention output, its best rival",
        f"{OURS} K4", "160 to 512 tokens", "0.990 against 0.971", "exact KL in float64, the last query, five layers, all entries",
        "difference of Spearman's ρ", Rule("above", 0), m.difference(m.rank("fisher"), m.rank("single_eviction")), WITHOUT,
    ),
    Claim(
        "O4", "The centred score A‖ν − o‖ lowers L against attention-only in most heads",
        f"{OURS} C3", "4 contexts of 1,024 tokens", "77 %", ALONE,
        "share of heads improved", Rule("above", 0.5), m.single_improved("centred"),
    ),
    Claim(
        "O4.norm", "A‖ν‖ in one stage does", f"{OURS} B3", "4 contexts of 1,024 tokens", "51 %", ALONE,
        "share of heads improved", Rule("above", 0.5),
        m.single_improved("norm"),
    ),
    Claim(
        "O4.group", "The centred score does where heads share entries, over a window, with pooling", f"{OURS} C3", "", None, FIRST,
        "share of heads improved", Rule("above", 0.5), m.improved("snapkv+centred"), ablate("score"),
    ),
    Claim(
        "O5", "Heads cancel: less than half of their errors' sum reaches the layer's output",
        f"{OURS} T5", "n = 1,024", "0.40 to 0.44", f"{FIRST}, attention-only, mean over layers",
        "‖Σ Δ‖ / Σ ‖Δ‖", Rule("below", 0.5), m.coupling(),
    ),
    Claim(
        "O6", "Over all budgets, Fisher's choice changes the next tokens less than two-stage selection's",
        f"{OURS} K4", "5 contexts of 2,048 tokens", "−48 % at 5 %, −49 % at 40 %", f"mean over {BUDGETS}",
        "change of the KL", Rule("below", 0),
        m.kl_change("fisher", CANDIDATE), needs=("fisher",),
    ),
    Claim(
        "Q1", "θ is tight: within twice the truth", OPEN, "", None, ALONE, "median θ / L", Rule("below", 2),
        m.single_median("theta", "perturbation"),
    ),
    Claim(
        "Q2", "Greedy two-stage selection with ε = 0 comes within 5 % of the least θ", OPEN, "", None,
        f"{ALONE}; against a lower bound, so the gap is at most this; three layers", "θ over its certified lower bound, less 1",
        Rule("below", 0.05, only="holds"), m.optimum_gap("two-stage, ε = 0"),
    ),
    Claim(
        "Q2.truth", "Attention-only selection comes within 10 % of the least true error", OPEN, "", None,
        f"{ALONE}; L2, against the least that an exchange search found, so the gap is at least this; three layers",
        "L over the least found, less 1",
        Rule("below", 0.1, only="does not hold here"),
        m.optimum_gap("attention", column="perturbation", optimum=LEAST_L, norm="L2"), needs=(LEAST_L,),
    ),
    Claim(
        "Q3", "What the window chose serves later queries as well as its own, within 10 %", OPEN, "", None,
        f"{MIDDLE}, attention-only", "change of ΣL", Rule("within", 0.1), m.window_to_later(),
    ),
    Claim(
        "Q4", "Choices that perturb less change the next tokens less", OPEN, "", None,
        f"{MIDDLE}, over the pair and its variants, each choice once; Σ over layers of L against the KL of the same tokens",
        "Spearman's ρ", Rule("above", 0),
        m.behaviour_rank(),
    ),
)  # fmt: skip
"""In the ledger's order."""
