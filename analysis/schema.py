"""The tables of a run, declared once: columns, types, meanings. Everything that people read is made from these rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

Kind = Literal["string", "int", "float"]
_ARROW = {"string": pa.string(), "int": pa.int64(), "float": pa.float64()}

POLICIES = {"snapkv": "attention-only", "snapkv+two-stage": "two-stage"}
"""The policies that a validation compares, and what figures call them."""

QUERY_SETS = {
    "window": "the prompt's last queries, which chose the entries",
    "first": "the first decoded token (the paper's protocol)",
    "later": "the tokens decoded after it",
}
"""Whose attention is judged; always apart, since only the first set was looked at when the entries were chosen."""


@dataclass(frozen=True)
class Column:
    """One column: `key` columns tell rows apart, `nullable` ones may be empty for the reason that `meaning` gives."""

    name: str
    kind: Kind
    meaning: str
    key: bool = False
    nullable: bool = False


@dataclass(frozen=True)
class Table:
    """A table's columns, in order, and the file it lives in."""

    name: str
    columns: tuple[Column, ...]

    @property
    def file(self) -> str:
        """The file's name in a run's folder."""
        return f"{self.name}.parquet"

    @property
    def keys(self) -> list[str]:
        """The columns that tell rows apart."""
        return [column.name for column in self.columns if column.key]

    @property
    def arrow(self) -> pa.Schema:
        """The columns as Arrow knows them, their meanings in the fields' metadata."""
        fields = [
            pa.field(column.name, _ARROW[column.kind], column.nullable, {"meaning": column.meaning}) for column in self.columns
        ]
        return pa.schema(fields)

    def checked(self, frame: pd.DataFrame) -> pd.DataFrame:
        """`frame` with exactly the declared columns in the declared order.

        Raises:
            ValueError: a column is missing or unknown, a value is missing where none may be, or two rows share their key.
        """
        names = [column.name for column in self.columns]
        if not len(frame.columns):  # nothing was measured
            return self.arrow.empty_table().to_pandas()
        if set(frame.columns) != set(names):
            raise ValueError(
                f"{self.name}: missing columns {sorted(set(names) - set(frame.columns))}, unknown columns "
                f"{sorted(set(frame.columns) - set(names))}"
            )
        required = [column.name for column in self.columns if not column.nullable]
        if (empty := frame[required].isna().any()).any():
            raise ValueError(f"{self.name}: empty values in {list(empty[empty].index)}")
        if (twice := frame.duplicated(self.keys)).any():
            raise ValueError(f"{self.name}: {int(twice.sum())} rows repeat the key of another; keys are {self.keys}")
        return frame[names].reset_index(drop=True)

    def write(self, frame: pd.DataFrame, path: Path, about: Mapping[str, str]) -> None:
        """Write the rows as Parquet, with `about` (the model's name and the like) in the file's metadata."""
        table = pa.Table.from_pandas(self.checked(frame), self.arrow, preserve_index=False)
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), **about})
        pq.write_table(table, path)

    def read(self, path: Path) -> pd.DataFrame:
        """The rows of a file that `write` made."""
        return self.checked(pq.read_table(path).to_pandas())


_CONTEXT = Column("context", "string", "name of the text", key=True)
_BUDGET = Column("budget", "float", "share of the prompt's entries that each KV head keeps, the window counted", key=True)
_CELL = (
    _CONTEXT,
    Column("layer", "int", "decoder layer, from 0", key=True),
)
_CHOICE = (
    Column(
        "policy",
        "string",
        "what chose the entries: "
        + ", ".join(POLICIES)
        + "; a variant is written with the parameters that differ from the run's "
        "(snapkv+two-stage:epsilon=0)",
        key=True,
    ),
    _BUDGET,
)
_JUDGED = (
    Column("queries", "string", "whose attention is judged: " + ", ".join(QUERY_SETS), key=True),
    Column(
        "norm",
        "string",
        "L1 or L2, on both sides of the bound; variants are judged in L1, and in L2 only where they say what the run's settings say",
        key=True,
    ),
)

HEADS = Table(
    "heads",
    (
        *_CELL,
        Column("head", "int", "query head, from 0", key=True),
        Column("kv_head", "int", "the KV head that it reads"),
        *_CHOICE,
        *_JUDGED,
        Column("perturbation", "float", "L = ‖(o − ô) W_h‖, exact; mean over the query set"),
        Column("theta", "float", "the paper's bound θ on L; mean over the query set"),
        Column("retained_mass", "float", "σ, the attention on entries that were kept; mean over the query set"),
        Column("retained_share", "float", "share of the query set's queries with σ > ½"),
        Column(
            "stage1_mass",
            "float",
            "σ₁, the attention on stage 1's entries and those always kept (the window, tokens after the prompt); mean; "
            "empty where the policy has no stages",
            nullable=True,
        ),
        Column("stage1_share", "float", "share of queries with σ₁ > ½; empty where there are no stages", nullable=True),
        Column("violations", "int", "queries of the set with L > θ beyond rounding; 0 or something is wrong"),
    ),
)

LAYERS = Table(
    "layers",
    (
        *_CELL,
        *_CHOICE,
        *_JUDGED,
        Column("perturbation", "float", "‖Σ_h (o_h − ô_h) W_h‖, heads summed before the norm; mean over the query set"),
        Column(
            "coupling",
            "float",
            "‖Σ_h Δ_h‖ / Σ_h ‖Δ_h‖: 1 where the heads' errors add up, 0 where they cancel; mean over the query set; empty "
            "where nothing changed",
            nullable=True,
        ),
        Column(
            "drift",
            "float",
            "‖hidden − hidden of the full cache‖ / ‖hidden of the full cache‖ after the layer, by a real forward pass with "
            "every layer evicted; mean over the query set; empty for the window, which ran before anything was evicted, and "
            "for variants that are not the pair in other words",
            nullable=True,
        ),
    ),
)

RUNS = Table(
    "runs",
    (
        _CONTEXT,
        Column("policy", "string", "what chose the entries; 'full' is the full cache", key=True),
        _BUDGET,
        Column("tokens", "int", "tokens of the prompt"),
        Column("kl", "float", "KL(full ‖ evicted) of the next tokens' distributions, in nats; mean over the tokens"),
        Column("agreement", "float", "share of the next tokens whose likeliest token is the full cache's"),
        Column("entries_kept", "int", "entries that a KV head keeps of the prompt, mean over layers and heads, rounded"),
        Column("bytes", "int", "bytes of the cache after the prompt"),
    ),
)

LEAST_L = "least L found"
"""The choice of `single` that a search for the least error found."""

_CHOICE_RULE = Column(
    "choice",
    "string",
    "what chose the entries: attention (A), norm (A‖ν‖), two-stage (the run's α and ε), two-stage, ε = 0, centred (A‖ν − o‖), ratio (the "
    "exact minimiser of θ_o), least θ (the least that branch and bound found; see `lower`), least L found (by "
    "exchanges, on the true L2 error)",
    key=True,
)

SINGLE = Table(
    "single",
    (
        *_CELL,
        Column("head", "int", "query head, from 0, with entries of its own", key=True),
        _CHOICE_RULE,
        Column("budget", "float", "share of the entries that are kept, none always", key=True),
        Column("norm", "string", "L1 or L2", key=True),
        Column("perturbation", "float", "L = ‖(o − ô) W_h‖, exact, for the prompt's last query"),
        Column("theta", "float", "the paper's bound θ"),
        Column("theta_o_hat", "float", "our bound θ_ô = Σ_E A‖ν − ô‖"),
        Column("retained_mass", "float", "σ"),
        Column("lower", "float", "what no choice can bring θ below; empty but for 'least θ' in L1", nullable=True),
        Column("violations", "int", "1 where a link of L ≤ θ_ô ≤ θ is broken beyond rounding"),
    ),
)
"""The theory's own setting: the prompt's last query and its own attention, each query head by itself, no pooling, nothing always kept."""

ENTRIES = Table(
    "entries",
    (
        *_CELL,
        Column("kv_head", "int", "KV head, from 0", key=True),
        Column("entry", "int", "position of the entry", key=True),
        Column("exact", "float", "KL of the next token's distribution with and without the entry, in nats, in float64"),
        Column("fisher", "float", "its estimate from the Fisher information, in nats"),
        Column("straight_through", "float", "its estimate with all later layers taken as the identity, in nats"),
        Column("straight_through_layer", "float", "the same, the layer's own MLP counted, in nats"),
        Column("attention", "float", "A, mean over the group's heads"),
        Column("value_norm", "float", "A‖V W_O‖₁, mean over the group's heads"),
        Column("single_eviction", "float", "‖Σ_h A/(1 − A)(o − ν)‖₂, the exact error of the attention output"),
    ),
)
"""One row per cache entry of the first tokens of a context: what its removal alone does, exact and estimated by the last query."""

ALLOCATION = Table(
    "allocation",
    (
        _CONTEXT,
        Column("policy", "string", "what chose the entries", key=True),
        Column("budget", "float", "share of the prompt's entries that a KV head keeps on average", key=True),
        Column("layer", "int", "decoder layer, from 0", key=True),
        Column("kv_head", "int", "KV head, from 0", key=True),
        Column("kept", "int", "entries that this head keeps"),
        Column("tokens", "int", "entries that it had"),
    ),
)

KEPT = Table(
    "kept",
    (
        _CONTEXT,
        Column("policy", "string", "what chose the entries", key=True),
        Column("budget", "float", "share of the prompt's entries that a KV head keeps on average", key=True),
        Column("position", "int", "of the token in the prompt, from 0", key=True),
        Column("token", "string", "the token's text"),
        Column("share", "float", "of all KV heads of all layers, the share that keeps its entry"),
    ),
)

TIMINGS = Table(
    "timings",
    (
        _CONTEXT,
        Column("policy", "string", "what chose the entries; 'full' is the full cache", key=True),
        Column("budget", "float", "share of the prompt's entries that each KV head keeps", key=True),
        Column("repeat", "int", "policies take turns; this is the turn", key=True),
        Column("first_token_s", "float", "seconds from the prompt to the first token's logits and the compressed cache"),
        Column("token_s", "float", "seconds for each token decoded after it"),
    ),
)

VERDICTS = ("holds", "does not hold here", "undecided", "not measured")

CLAIMS = Table(
    "claims",
    (
        Column(
            "id",
            "string",
            "C1 to C10 are CriticalKV's, B the behaviour paper's, O ours, Q its open questions; docs/claims.md",
            key=True,
        ),
        Column("statement", "string", "what is claimed, and in brackets what decides it: a quantity and its threshold"),
        Column("paper_value", "string", "what the source reports, in its setting; empty where it gives none", nullable=True),
        Column(
            "value",
            "float",
            "what was measured here: the mean over contexts, or over samples of tasks; empty where nothing was",
            nullable=True,
        ),
        Column("low", "float", "lower end of its interval at 95 %", nullable=True),
        Column("high", "float", "upper end", nullable=True),
        Column("verdict", "string", "one of " + ", ".join(VERDICTS)),
        Column(
            "setting", "string", "on what it was measured: model, contexts, budget, queries; or would be, and why it was not"
        ),
        Column("command", "string", "what measures it, or would"),
    ),
)

FULL = "full"
"""The policy that evicts nothing; its rows are there once, at budget 1."""
RIGHT = 0.5
"""The score from which on an answer counts as right."""

_TRUTH = (
    "; mean over layers, heads and the answer's first queries; 0 for the full cache; empty where none were judged or heads have none of "
    "their own"
)

_MODEL = Column("model", "string", "the model's name", key=True)
_SOURCE = Column("source", "string", "the task as it was asked for: a name, a file, a data set", key=True)
_LENGTH = Column("length", "int", "tokens that were asked for; 0 of a table, whose rows are as long as they are", key=True)
_QUESTION = Column(
    "question", "string", "whether entries were chosen with the question seen (query-aware) or unseen (agnostic)", key=True
)
_CHOOSER = Column("policy", "string", "what chose the entries; 'full' is the full cache", key=True)
_SIZE = Column("budget", "float", "entries per KV head, or a share of the context's in (0, 1]; 1 is the full cache", key=True)

SAMPLES = Table(
    "samples",
    (
        _MODEL,
        _SOURCE,
        Column("task", "string", "the task that the row names, by which its answer is scored"),
        _LENGTH,
        Column("seed", "int", "of what was drawn", key=True),
        Column("sample", "int", "place in the task's table", key=True),
        _QUESTION,
        _CHOOSER,
        _SIZE,
        Column(
            "depth",
            "float",
            "where in the context the answer stands, from 0 to 1; empty where there is no one place",
            nullable=True,
        ),
        Column("tokens", "int", "tokens whose entries were chosen among"),
        Column("prediction", "string", "what the model said"),
        Column("answer", "string", "the reference answers, a line each"),
        Column("score", "float", "of the answer, in [0, 1], by the task's metric"),
        Column("full_score", "float", "the same of the full cache's answer to this sample"),
        Column("flipped", "int", "1 where the full cache was right (score ≥ ½) and this is not"),
        Column(
            "kl",
            "float",
            "KL(full ‖ evicted) in nats; mean over the tokens of the full cache's answer (the reference, where that is given)",
        ),
        Column("agreement", "float", "share of those tokens for which the likeliest one is the full cache's"),
        Column("log_likelihood", "float", "mean log-probability of those tokens, in nats; perplexity is exp(−log_likelihood)"),
        Column("judged_tokens", "int", "how many those are"),
        Column("perturbation", "float", "L = ‖(o − ô) W_h‖₁, exact" + _TRUTH, nullable=True),
        Column("theta", "float", "the paper's bound θ on L" + _TRUTH, nullable=True),
        Column("retained_mass", "float", "σ, the attention on entries that were kept" + _TRUTH, nullable=True),
        Column("retained_share", "float", "share of heads and queries with σ > ½; empty as those", nullable=True),
        Column(
            "relative_perturbation",
            "float",
            "‖Σ_h (o_h − ô_h)‖₁ / ‖Σ_h o_h‖₁ of a layer's attention output; mean over layers and those queries; empty as those",
            nullable=True,
        ),
        Column("entries_kept", "float", "entries of the context that a KV head keeps, mean over layers and heads"),
        Column("bytes", "int", "bytes of the cache after the context"),
        Column("full_bytes", "int", "bytes of the full cache after the context"),
        Column("cell", "string", "the cell's id: a digest of its settings, the code and the data"),
    ),
)
"""A row per sample, policy and budget of `criticalkv evaluate`."""

_CHOSEN = (
    _MODEL,
    _SOURCE,
    Column("task", "string", "the task that the rows name; a file may have several", key=True),
    _LENGTH,
    _QUESTION,
    _CHOOSER,
    _SIZE,
)
_ENDS = "; empty where there is one sample"

SCORES = Table(
    "scores",
    (
        *_CHOSEN,
        Column("samples", "int", "samples, over all seeds"),
        Column("score", "float", "mean score"),
        Column(
            "score_low",
            "float",
            "lower end of its interval at 95 % (Wilson where all are 0 or 1, else bootstrap)" + _ENDS,
            nullable=True,
        ),
        Column("score_high", "float", "upper end" + _ENDS, nullable=True),
        Column("change", "float", "mean of score − the full cache's score, sample by sample"),
        Column("change_low", "float", "lower end of its interval (bootstrap)" + _ENDS, nullable=True),
        Column("change_high", "float", "upper end" + _ENDS, nullable=True),
        Column("p", "float", "Wilcoxon's signed-rank test that the change is around 0"),
        Column(
            "p_adjusted",
            "float",
            "the same, adjusted by Benjamini-Hochberg over the table; empty for the full cache",
            nullable=True,
        ),
        Column(
            "flipped",
            "float",
            "share of the full cache's right answers (score ≥ ½) that turned wrong; empty where it has none",
            nullable=True,
        ),
        Column("flipped_low", "float", "lower end of its interval (Wilson); empty as that", nullable=True),
        Column("flipped_high", "float", "upper end; empty as that", nullable=True),
        Column("kl", "float", "mean KL(full ‖ evicted) in nats"),
        Column("kl_low", "float", "lower end of its interval (bootstrap)" + _ENDS, nullable=True),
        Column("kl_high", "float", "upper end" + _ENDS, nullable=True),
        Column("perturbation", "float", "mean L; empty where none was measured", nullable=True),
        Column("perturbation_low", "float", "lower end of its interval (bootstrap); empty as that" + _ENDS, nullable=True),
        Column("perturbation_high", "float", "upper end; empty as that" + _ENDS, nullable=True),
        Column("bytes_share", "float", "bytes of the cache as a share of the full cache's, mean"),
    ),
)
"""A row per task, length, policy and budget: means over samples, with intervals."""

TABLES = (HEADS, LAYERS, RUNS, SINGLE, ENTRIES, ALLOCATION, KEPT, TIMINGS)
"""What a validation measures; `CLAIMS` is made of them, and of `SAMPLES` where there are any. A table that was not asked for is empty."""
