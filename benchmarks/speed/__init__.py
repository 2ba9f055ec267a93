"""How fast radixstate is beside other prefix caches for recurrent states; see docs/performance.md."""
