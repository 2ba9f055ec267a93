"""radixstate as the prefix cache of sglang: `--radix-cache-backend radixstate`. See docs/sglang.md.

    plugin    what sglang calls at its start
    options   what a user chooses, and what is refused
    backend   the cache that sglang's scheduler calls
    pool      sglang's pools as radixstate sees them, and the other way round
    int8_pool the codec alone, behind sglang's own tree
    order     depth-first order of requests that wait

Importing this package imports nothing of sglang.
"""
