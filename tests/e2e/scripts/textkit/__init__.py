"""What the text scripts of this folder share: a tokenizer that needs no download, and a few sentences."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SENTENCES = [
    "the ferry leaves at nine",
    "two kettles boil faster than one",
    "rain is likely on the northern coast",
    "please return the ladder by friday",
    "her violin was made in 1782",
    "no trains run on the last sunday",
    "the recipe needs three ripe pears",
    "a lamp was left on in the hall",
]

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def letters() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: one token per byte, four special tokens in front."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    return fast
