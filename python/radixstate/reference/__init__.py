"""The cache and the codec once more, slowly and plainly: documentation, and the oracle of the tests.

Nothing here is shared with the library. Read `records`, `books`, `base`, then `cache` for schedulers or `engine` for
engines that allocate the pages; `codec` stands alone and needs torch.
"""
