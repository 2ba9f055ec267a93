"""The cache and the codec once more, slowly and plainly: documentation, and the oracle of the tests.

Nothing here is shared with the library. Read `records`, then `cache`; `codec` stands alone and needs torch.
"""
