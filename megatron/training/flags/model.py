"""Flags of the model and of what it trains on."""

from __future__ import annotations

from .flag import Flag, real, whole

MODEL = (
    Flag("--num-layers", "Transformer layers.", whole(1)),
    Flag("--hidden-size", "Width of the residual stream.", whole(1)),
    Flag("--ffn-hidden-size", "Width inside the MLP; 4 x hidden size by default.", whole(1)),
    Flag("--num-attention-heads", "Attention heads.", whole(1)),
    Flag("--group-query-attention", "Share keys and values among groups of query heads."),
    Flag(
        "--num-query-groups",
        "Groups of query heads, each with one key and value head; needs --group-query-attention.",
        whole(1),
    ),
    Flag(
        "--kv-channels",
        "Width of one attention head; hidden size / number of heads by default.",
        whole(1),
    ),
    Flag("--seq-length", "Tokens per sample.", whole(1)),
    Flag(
        "--max-position-embeddings",
        "Rows of the table of learned positions; at least --seq-length.",
        whole(1),
    ),
    Flag(
        "--position-embedding-type",
        "How tokens know their place.",
        str,
        "learned_absolute",
        ("learned_absolute", "rope"),
    ),
    Flag("--rotary-base", "Base of the rotary frequencies; with rope.", whole(1), 10000),
    Flag(
        "--rotary-percent",
        "Share of each head's channels that is rotated; with rope.",
        real(0.0, 1.0 + 1e-9, above=True),
        1.0,
    ),
    Flag("--swiglu", "Gated MLP with SiLU instead of GELU."),
    Flag("--normalization", "Kind of norm layers.", str, "LayerNorm", ("LayerNorm", "RMSNorm")),
    Flag("--norm-epsilon", "Added to the variance in norm layers.", real(0.0), 1e-5),
    Flag("--untie-embeddings-and-output-weights", "Give the output layer a matrix of its own."),
    Flag(
        "--disable-bias-linear",
        "Leave the biases out of linear layers.",
        dest="add_bias_linear",
        default=True,
    ),
    Flag("--add-qkv-bias", "Keep a bias in the QKV linear under --disable-bias-linear."),
    Flag("--init-method-std", "Standard deviation of initial weights.", real(0.0), 0.02),
    Flag(
        "--hidden-dropout", "Dropout after attention and MLP (Megatron: 0.1).", real(0.0, 1.0), 0.0
    ),
    Flag(
        "--attention-dropout", "Dropout of attention weights (Megatron: 0.1).", real(0.0, 1.0), 0.0
    ),
    Flag(
        "--make-vocab-size-divisible-by",
        "Pad the vocabulary to a multiple of this x TP.",
        whole(1),
        128,
    ),
    Flag(
        "--recompute-granularity",
        "Compute the activations of whole layers anew in the backward pass, instead of keeping them.",
        str,
        None,
        ("full",),
    ),
    Flag(
        "--recompute-method",
        "Of all layers, in stretches (uniform), or of the first ones (block); needs "
        "--recompute-granularity.",
        str,
        None,
        ("uniform", "block"),
    ),
    Flag(
        "--recompute-num-layers",
        "Layers of a stretch, or how many of the first; needs --recompute-method.",
        whole(1),
    ),
    Flag("--num-experts", "Experts per MoE layer.", whole(1)),
    Flag(
        "--moe-router-topk",
        "Experts that each token is sent to; 2 by default. Needs --num-experts.",
        whole(1),
    ),
    Flag(
        "--moe-router-pre-softmax",
        "Share a token out by a softmax over all experts, rather than over the chosen ones.",
    ),
    Flag(
        "--moe-ffn-hidden-size", "Width inside one expert; --ffn-hidden-size by default.", whole(1)
    ),
)

BATCH = (
    Flag("--micro-batch-size", "Samples per rank in one forward pass.", whole(1)),
    Flag(
        "--global-batch-size",
        "Samples per iteration over all ranks; micro batch x data-parallel size by default.",
        whole(1),
    ),
    Flag("--train-iters", "Iterations to train.", whole(0)),
    Flag("--exit-interval", "Stop after an iteration that is a multiple of this.", whole(1)),
    Flag("--seed", "Of initial weights and of the order of samples.", whole(0), 1234),
    Flag(
        "--calculate-per-token-loss",
        "Weigh every token of the global batch alike, rather than every microbatch.",
    ),
)

DATA = (
    Flag(
        "--data-path",
        "Prefixes of .bin/.idx files, or pairs of weight and prefix; the English "
        "documentation inside Python by default.",
        str,
        nargs="+",
        metavar="PREFIX",
    ),
    Flag("--mock-data", "Made-up tokens."),
    Flag("--split", "Shares of documents for training, validation and test.", str, "969,30,1"),
    Flag(
        "--data-cache-path",
        "Folder of index files and of the tokenized default text.",
        str,
        metavar="FOLDER",
    ),
    Flag(
        "--tokenizer-type",
        "NullTokenizer needs --vocab-size, HuggingFaceTokenizer needs --tokenizer-model.",
        str,
        None,
        ("ByteTokenizer", "HuggingFaceTokenizer", "NullTokenizer"),
    ),
    Flag("--tokenizer-model", "A Hugging Face tokenizer.json.", str, metavar="FILE"),
    Flag("--vocab-size", "Tokens in the vocabulary, without padding.", whole(1)),
    Flag("--eval-interval", "Iterations between evaluations; none by default.", whole(1)),
    Flag("--eval-iters", "Global batches per evaluation.", whole(0), 100),
)
