"""Tokenizers made here, of several kinds: what a task must be as long as asked under, and what tiny models read."""

from functools import cache

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from analysis.tasks.haystack import documentation

TEMPLATE = (
    "{% for turn in messages %}<|{{ turn['role'] }}|>{{ turn['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
KINDS = ("byte-level BPE", "WordPiece", "Unigram", "bytes", "reference")


@cache
def tokenizer(kind: str = "byte-level BPE", size: int = 500, template: bool = True):
    """A tokenizer of that kind, trained on Python's documentation."""
    if kind == "bytes":
        return ByT5Tokenizer(extra_ids=0)
    if kind == "reference":
        from hooks.reference import load_tokenizer

        return load_tokenizer()[0]
    if kind == "WordPiece":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=4 * size, special_tokens=SPECIAL)
    elif kind == "Unigram":
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=4 * size, special_tokens=SPECIAL, unk_token="<unk>")
    else:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevelDecoder()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
    words = documentation()[:20_000]
    made.train_from_iterator([" ".join(words[at : at + 100]) for at in range(0, len(words), 100)], trainer)
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    if template:
        found.chat_template = TEMPLATE
    return found


def counted(kind: str):
    """How many tokens a text has."""
    used = tokenizer(kind)
    return lambda text: len(used(text, add_special_tokens=False, verbose=False).input_ids)
