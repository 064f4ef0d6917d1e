"""Every task: the same samples from the same seed, as long as asked, answers in their place; the truth scores 1 and nothing 0."""

import json
import re

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokens import KINDS, counted

from analysis.errors import InputError
from analysis.tasks import (
    GROUPS,
    METRICS,
    Asked,
    Sample,
    known,
    make,
    metric,
    names,
    register,
    ruling,
    samples,
    task,
    unregister,
)
from analysis.tasks.fitting import Draft, fitted
from analysis.tasks.haystack import documentation, words_of
from analysis.tasks.longbench import KINDS as LONGBENCH
from analysis.tasks.ruler.niah import KINDS as NIAH

OFFLINE = [*GROUPS["ruler-offline"], "needle", "fidelity"]
SQUAD = [
    {
        "context": f"The river number {number} is {number * 37} miles long. "
        + " ".join(documentation()[number * 50 : number * 50 + 60]),
        "question": f"How long is the river number {number}?",
        "answers": {"text": [f"{number * 37} miles"], "answer_start": [0]},
    }
    for number in range(40)
]
HOTPOT = [
    {
        "context": {
            "title": [f"City {number}", f"River {number}"],
            "sentences": [
                [f"City {number} lies on river {number}.", " It is old."],
                [f"River {number} flows into lake {number}."],
            ],
        },
        "question": f"Into which lake flows the river on which city {number} lies?",
        "answer": "yes" if number == 3 else f"lake {number}",
    }
    for number in range(500)
]


def written(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reading")
    return {"qa_1": written(folder / "squad.jsonl", SQUAD), "qa_2": written(folder / "hotpot.jsonl", HOTPOT)}


# the least lengths at which all of a family fit; by bytes a text has four times as many tokens
LEAST = {"bytes": 5000, "byte-level BPE": 2600}


@settings(max_examples=12)
@given(data=st.data())
@pytest.mark.parametrize("name", [*OFFLINE, "qa_1", "qa_2"])
def test_a_sample_is_as_long_as_asked_and_holds_its_answers(name, data, reading):
    kind = data.draw(st.sampled_from(KINDS))
    length, seed = data.draw(st.integers(LEAST.get(kind, 1200), 9000)), data.draw(st.integers(0, 2**32))
    if name == "cwe" and kind in LEAST:
        length += 6000  # from 4,096 tokens on its words are repeated more often
    count = counted(kind)
    asked = Asked(1, length, count, seed, data=reading.get(name))
    (sample,) = make(name, asked)
    assert 0.98 * length <= count(sample.text) <= length
    if name != "fidelity":
        said = sample.context.lower()
        found = [answer.lower() in said for answer in sample.answer]
        assert any(found) if name.startswith("qa") else all(found)
    rule = ruling(sample, name).metric
    if rule != "forced":
        assert metric(rule)(", ".join(sample.answer), sample) == 1
        assert metric(rule)("", sample) == 0
        assert metric(rule)("nothing of the kind", sample) == 0
    assert make(name, asked) == [sample]


@pytest.mark.parametrize("name", OFFLINE)
def test_samples_are_drawn_apart_and_more_of_them_begin_with_the_same(name):
    asked = {"length": 1500, "count": counted("reference")}
    three = make(name, Asked(3, seed=1, **asked))
    assert make(name, Asked(2, seed=1, **asked)) == three[:2]
    others = make(name, Asked(3, seed=2, **asked))
    texts = [one.context for one in (*three, *others)]
    assert len(set(texts)) == 6
    assert [one.number for one in three] == [0, 1, 2]


@pytest.mark.parametrize("name", list(NIAH))
def test_needles_are_as_many_as_rulers(name):
    kind = NIAH[name]
    (sample,) = make(name, Asked(1, 1500, counted("reference")))
    needles = re.findall(r"One of the secret \w+ for (\S+) is: (\S+)\.", sample.context)
    asked = [key for key in dict(needles) if key in sample.question]
    assert len(asked) == kind.queries
    assert sorted(value for key, value in needles if key in asked) == sorted(sample.answer)
    assert len(sample.answer) == kind.queries * kind.values
    if kind.hay == "needles":
        assert len(needles) > 8  # all of the hay
    else:
        assert len(needles) == kind.keys * kind.values
    for _, value in needles:
        assert re.fullmatch(r"\d{7}" if kind.value == "numbers" else r"[0-9a-f-]{36}", value)


def test_a_chain_of_variables_leads_to_all_that_are_asked_for():
    (sample,) = make("vt", Asked(1, 1500, counted("reference")))
    text = sample.context[sample.context.rindex("Variables are assigned") :]
    value = re.search(r"value (\d{5})", sample.question).group(1)
    links = re.findall(r"^VAR ([A-Z]{5}) = (?:VAR ([A-Z]{5})|(\d{5}))$", text, re.M)
    holds = [name for name, _, number in links if number == value]
    for name, source, _ in links:  # in the order of the text
        if source in holds:
            holds.append(name)
    assert tuple(holds) == sample.answer
    assert len(holds) == 5


@pytest.mark.parametrize(("length", "often", "seldom"), [(1500, 6, 1), (5000, 30, 3)])
def test_common_words_are_the_most_frequent(length, often, seldom):
    (sample,) = make("cwe", Asked(1, length, counted("reference")))
    listed = re.findall(r"\d+\. (\S+)", sample.context[sample.context.rindex("Below is a numbered list") :])
    counts = pd.Series(listed).value_counts()
    assert set(counts.index[:10]) == set(sample.answer)
    assert set(counts[list(sample.answer)]) == {often}
    assert set(counts.drop(list(sample.answer))) == {seldom}


def test_common_words_go_on_in_pairs_where_english_ends():
    (sample,) = make("cwe", Asked(1, 60_000, lambda text: len(text.split())))
    assert len(re.findall(r"\d+\. ", sample.context)) > 25_000


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), length=st.integers(500, 5000))
def test_frequent_words_fall_with_their_rank(seed, length):
    (sample,) = make("fwe", Asked(1, length, counted("reference"), seed))
    words = sample.context.split("\n")[-2].split()
    counts = pd.Series([word for word in words if word != "..."]).value_counts()
    assert tuple(counts.index[:3]) == sample.answer
    assert counts.iloc[2] > counts.iloc[3]


def test_the_needle_goes_through_the_depths():
    found = make("needle", Asked(10, 4000, counted("reference"), depths=5))
    assert [one.depth for one in found] == [0, 0.25, 0.5, 0.75, 1] * 2
    for one in found:
        text = one.context
        assert text.index(one.answer[0]) / len(text) == pytest.approx(one.depth, abs=0.04)
    endless = tuple(f"word{number}" for number in range(400))  # a text in which no sentence ends
    for one in make("needle", Asked(5, 2000, counted("reference"), haystack=endless)):
        assert one.context.index(one.answer[0]) / len(one.context) == pytest.approx(one.depth, abs=0.05)
    assert {one.depth for one in make("needle", Asked(2, 1200, counted("reference"), depths=1))} == {0.5}
    with pytest.raises(InputError, match="--depths must be at least 1, not 0"):
        make("needle", Asked(1, 1200, counted("reference"), depths=0))


def test_the_words_that_follow_are_the_same_at_any_length():
    short, long = (make("fidelity", Asked(1, length, counted("reference")))[0] for length in (300, 900))
    assert short.answer == long.answer
    assert long.context.endswith(short.context)
    with pytest.raises(InputError, match="fidelity: a text of 150 words is too short for 1000 tokens"):
        make("fidelity", Asked(1, 1000, counted("reference"), haystack=tuple(f"word{number}" for number in range(150))))


def test_a_users_text_takes_the_place_of_the_documentation():
    words = words_of("It was a bright cold day in April. " * 40)
    (sample,) = make("niah_single_2", Asked(1, 400, counted("reference"), haystack=words))
    assert "bright cold day" in sample.context
    with pytest.raises(InputError, match="a haystack of 2 words is too short"):
        words_of("too short")


def test_what_does_not_fit_is_refused_with_the_length_that_would():
    with pytest.raises(
        InputError, match=r"a context length of 60 tokens is too short for this task and tokenizer: it takes at least \d+"
    ) as told:
        make("vt", Asked(1, 60, counted("reference")))
    least = int(str(told.value).rsplit(" ", 1)[1])
    make("vt", Asked(1, least, counted("reference")))
    with pytest.raises(InputError, match="too short"):
        make("vt", Asked(1, least - 1, counted("reference")))


@given(st.integers(1, 30), st.integers(1, 4), st.integers(30, 3000))
def test_drafts_are_the_longest_that_fit(unit, word, length):
    def build(units: int, words: int) -> Draft:
        return Draft("x" * (unit * units + word * words), "", "", ("x",))

    draft = fitted(build, length, len, least=1)
    assert len(draft.text) <= length
    # no unit more fits unless it is close, and no word
    assert length - len(draft.text) < max(word, 0.005 * length + 1)


class TestReading:
    def test_the_questions_own_documents_are_among_the_others(self, reading):
        count = counted("reference")
        (one,) = make("qa_1", Asked(1, 2000, count, data=reading["qa_1"]))
        assert one.context.count("Document ") > 5
        (two,) = make("qa_2", Asked(1, 2000, count, data=reading["qa_2"]))
        number = re.search(r"city (\d+) ", two.question).group(1)
        assert f"City {number} lies on river {number}." in two.context
        assert f"River {number} flows into lake {number}." in two.context
        assert two.answer == (f"lake {number}",)

    def test_answers_that_stand_nowhere_are_not_asked_for(self, reading):
        count = counted("reference")
        asked = make("qa_2", Asked(499, 900, count, data=reading["qa_2"]))
        assert all(one.answer != ("yes",) for one in asked)
        assert len({one.question for one in asked}) == 499  # each once before one comes again

    def test_documents_of_the_same_article_come_first(self, tmp_path):
        rows = [{**row, "title": f"article {number % 4}"} for number, row in enumerate(SQUAD)]
        (one,) = make("qa_1", Asked(1, 700, counted("reference"), data=written(tmp_path / "titled.jsonl", rows)))
        number = int(re.search(r"number (\d+)\?", one.question).group(1))
        found = [int(other) for other in re.findall(r"The river number (\d+) is", one.context)]
        assert len(found) > 3
        assert {other % 4 for other in found[:-1]} == {number % 4}  # the last is a part, which fills

    def test_too_few_documents_and_the_other_data_are_refused(self, reading, tmp_path):
        count = counted("reference")
        few = written(tmp_path / "few.jsonl", SQUAD[:2])
        with pytest.raises(InputError, match=r"qa_1: the data are enough for \d+ of 3000 tokens"):
            make("qa_1", Asked(1, 3000, count, data=few))
        with pytest.raises(InputError, match="is no data set for qa_2, whose contexts are titles with sentences"):
            make("qa_2", Asked(1, 1000, count, data=reading["qa_1"]))

    def test_without_data_the_message_names_some(self):
        with pytest.raises(InputError, match="--data rajpurkar/squad_v2@validation"):
            make("qa_1", Asked(1, 2000, counted("reference")))

    def test_data_of_another_form_are_refused(self, tmp_path):
        with pytest.raises(InputError, match="is no reading data set: it has the columns text"):
            make("qa_1", Asked(1, 2000, counted("reference"), data=written(tmp_path / "a.jsonl", [{"text": "a"}])))
        rows = [{"context": "a", "question": "b", "answer": "yes"}]
        with pytest.raises(InputError, match="no question whose answer stands in its documents"):
            make("qa_1", Asked(1, 2000, counted("reference"), data=written(tmp_path / "b.jsonl", rows)))


ROW = {
    "context": "A text.",
    "question": "What?",
    "answer_prefix": "",
    "answer": ["text"],
    "task": "mine",
    "max_new_tokens": 4,
}


class TestTables:
    @pytest.mark.parametrize("end", ["jsonl", "json", "parquet"])
    def test_a_file_of_rows_is_a_task(self, tmp_path, end):
        path = tmp_path / f"rows.{end}"
        frame = pd.DataFrame([{**ROW, "context": f"Text {number}."} for number in range(5)])
        if end == "parquet":
            frame.to_parquet(path)
        else:
            frame.to_json(path, orient="records", lines=end == "jsonl")
        found = make(str(path), Asked(10, 0, len))
        assert [one.context for one in found] == [f"Text {number}." for number in range(5)]
        assert found[0].answer == ("text",)
        some = make(str(path), Asked(3, 0, len, seed=1))
        assert len({one.context for one in some}) == 3
        assert some == make(str(path), Asked(3, 0, len, seed=1))
        assert make(str(path), Asked(2, 0, len, seed=1)) == some[:2]
        assert [found[one.number].context for one in some] == [one.context for one in some]  # numbers are the file's
        assert ruling(found[0], str(path)).metric == "part"

    def test_rows_of_the_public_generator_are_scored_by_their_task(self, tmp_path):
        """The columns of simonjegou/ruler, as its creator's script writes them."""
        row = {
            "context": "Some special magic numbers are hidden …\nOne of the special magic numbers for big-dog is: 123.\n",
            "question": "What is the special magic number for big-dog mentioned in the provided text?",
            "answer_prefix": " The special magic number for big-dog mentioned in the provided text is",
            "answer": ["123"],
            "task": "niah_single_1",
            "max_new_tokens": 128,
        }
        (found,) = make(written(tmp_path / "ruler.jsonl", [row]), Asked(1, 0, len))
        assert found == Sample("niah_single_1", 0, row["context"], row["question"], row["answer_prefix"], ("123",), 128)
        assert ruling(found, "ruler.jsonl").metric == "all"
        assert ruling(found, "ruler.jsonl").name == "niah_single_1"

    def test_a_folder_of_a_data_set_is_a_task(self, tmp_path):
        folder = tmp_path / "mine"
        folder.mkdir()
        pd.DataFrame([ROW]).to_parquet(folder / "test.parquet")
        assert make(f"{folder}@test", Asked(1, 0, len))[0].context == "A text."
        assert make(str(folder), Asked(1, 0, len))[0].context == "A text."

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"context": None}, "row 0: context must be text, not None"),
            ({"context": "  "}, "row 0: context is empty"),
            ({"question": 3}, "row 0: question must be text, not 3"),
            ({"question": ["a", "b"]}, "row 0: question must be text"),
            ({"answer": []}, r"row 0: answer must be a text or a list of texts, none of them empty; not \[\]"),
            ({"answer": [""]}, "none of them empty"),
            ({"answer": None}, "none of them empty"),
            ({"task": ""}, "row 0: task is empty"),
            ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, not 0"),
            ({"max_new_tokens": 1.5}, "not 1.5"),
            ({"max_new_tokens": "many"}, "not 'many'"),
            ({"max_new_tokens": float("nan")}, "not nan"),
            ({"max_new_tokens": float("inf")}, "not inf"),
        ],
    )
    def test_a_row_that_is_none_is_refused_by_its_number(self, change, message):
        with pytest.raises(InputError, match=message):
            samples(pd.DataFrame([{**ROW, **change}], dtype=object))

    def test_missing_columns_are_named(self):
        frame = pd.DataFrame([ROW]).drop(columns=["answer", "task"])
        with pytest.raises(InputError, match=r"rows\.jsonl has no column answer, task; a task needs context, question"):
            samples(frame, "rows.jsonl")
        with pytest.raises(InputError, match="has no row"):
            samples(pd.DataFrame(columns=list(ROW)))

    def test_a_question_may_be_missing_and_answers_may_be_one(self):
        (found,) = samples(pd.DataFrame([{**ROW, "question": None, "answer": "text"}]))
        assert (found.question, found.answer) == ("", ("text",))

    def test_a_number_in_a_csv_file_is_an_answer(self, tmp_path):
        path = tmp_path / "rows.csv"
        pd.DataFrame([{**ROW, "answer": 417}]).to_csv(path, index=False)
        (found,) = make(str(path), Asked(1, 0, len))
        assert found.answer == ("417",)

    def test_what_cannot_be_read_is_told(self, tmp_path):
        with pytest.raises(InputError, match="there is no file"):
            make(str(tmp_path / "none.jsonl"), Asked(1, 0, len))
        path = tmp_path / "broken.parquet"
        path.write_bytes(b"PAR1 and no more")
        with pytest.raises(InputError, match=r"broken\.parquet cannot be read"):
            make(str(path), Asked(1, 0, len))
        with pytest.raises(InputError, match="cannot be read"):
            make("nobody/nothing:at-all@test", Asked(1, 0, len))


class TestLongBench:
    def rows(self, name):
        return {
            "input": "Who came?",
            "context": "Anna came.",
            "answers": ["Anna", "Paragraph 1"],
            "length": 2,
            "dataset": name,
            "language": "en",
            "all_classes": ["Anna", "Bert"],
            "_id": "1",
        }

    def test_all_sixteen_take_its_own_rows(self, tmp_path):
        path = written(tmp_path / "longbench.jsonl", [self.rows(name) for name in LONGBENCH])
        assert len(GROUPS["longbench"]) == 16
        for name in GROUPS["longbench"]:
            (found,) = make(name, Asked(5, 0, len, data=path))
            assert found.task == name
            assert "Anna came." in found.context
            assert found.answer == ("Anna", "Paragraph 1")
            assert found.max_new_tokens == LONGBENCH[name].max_new_tokens
            assert found.length is None  # its column `length` counts words
            rule = known()[name].metric
            scored = metric(rule) if isinstance(rule, str) else rule
            truth = {"passage_retrieval_en": "Paragraph 1", "passage_count": "Anna"}.get(name, "Anna")
            if name != "passage_count":
                assert scored(truth, found) == 1
            assert scored("", found) == 0

    def test_a_file_of_its_rows_is_a_task_too(self, tmp_path):
        path = written(tmp_path / "longbench.jsonl", [self.rows("qasper"), self.rows("lcc")])
        found = make(path, Asked(5, 0, len))
        assert [one.task for one in found] == ["qasper", "lcc"]
        assert {one.task: ruling(one, path).metric for one in found} == {"qasper": "f1", "lcc": "edit"}
        text = written(tmp_path / "text.jsonl", [{**self.rows("qasper"), "answers": "paris"}])
        assert make("qasper", Asked(5, 0, len, data=text))[0].answer == ("paris",)
        with pytest.raises(InputError, match="LongBench's row 0 has no context, no input or no answers"):
            make("qasper", Asked(5, 0, len, data=written(tmp_path / "null.jsonl", [{**self.rows("qasper"), "context": None}])))
        with pytest.raises(InputError, match="has no row of the task hotpotqa"):
            make("hotpotqa", Asked(5, 0, len, data=path))


class TestNames:
    def test_groups_are_spelt_out_once(self):
        assert names(["ruler-offline", "vt", "needle"]) == [*GROUPS["ruler-offline"], "needle"]
        assert len(GROUPS["ruler"]) == 13
        assert len(GROUPS["ruler-offline"]) == 11

    def test_a_mistyped_name_is_met_with_near_ones(self):
        with pytest.raises(InputError, match="no task is called 'nia_single_1'; did you mean niah_single_1"):
            task("nia_single_1")

    def test_a_function_of_ones_own_is_a_task(self):
        @register("mine", metric="exact")
        def mine(asked):
            return pd.DataFrame([{**ROW, "context": f"{asked.length} {number}"} for number in range(asked.samples)])

        try:
            assert [one.context for one in make("mine", Asked(2, 7, len))] == ["7 0", "7 1"]
            assert task("mine").metric == "exact"
            with pytest.raises(InputError, match="'mine' cannot be registered: it is taken"):
                register("mine")
        finally:
            unregister("mine")
        register("broken")(lambda asked: 1 / 0)
        register("listed")(lambda asked: [])
        try:
            with pytest.raises(InputError, match="the task broken raised ZeroDivisionError"):
                make("broken", Asked(1, 7, len))
            with pytest.raises(InputError, match="the task listed must return a DataFrame, not list"):
                make("listed", Asked(1, 7, len))
        finally:
            unregister("broken")
            unregister("listed")
        with pytest.raises(InputError, match="no metric is called 'best'; there are all, part"):
            register("other", metric="best")
        with pytest.raises(InputError, match="no metric is called"):
            metric("best")
        assert "mine" not in known()
        assert set(METRICS) >= {"all", "f1", "rouge-l", "classification", "edit", "retrieval", "count"}
