"""vLLM and kvthaw on the same requests, each in a process of its own: what `lab.beside_vllm` starts and reads."""
