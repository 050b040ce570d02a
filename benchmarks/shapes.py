"""Model shapes the benchmarks run: experts on one rank, D, I, k and tokens, for EP 1."""

# The four paper shapes carry E/64 experts, as on one rank of EP 64; the two fine-tuning shapes all their experts.
SHAPES = {
    "kimi": dict(experts=6, hidden=7168, inter=2048, topk=8, tokens=(2048, 4096), shared=2048),
    "glm": dict(experts=4, hidden=6144, inter=2048, topk=8, tokens=(2048, 4096), shared=2048),
    "dsv4": dict(experts=6, hidden=7168, inter=3072, topk=6, tokens=(2048, 4096), shared=3072),
    "qwen": dict(experts=8, hidden=4096, inter=1024, topk=10, tokens=(2048, 4096), shared=1024),
    "q30b": dict(experts=128, hidden=2048, inter=768, topk=8, tokens=(4096, 8192), shared=0),
    "air": dict(experts=128, hidden=4096, inter=1408, topk=8, tokens=(4096, 8192), shared=1408),
}
