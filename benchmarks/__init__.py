"""Benchmarks of fastaccum: providers side by side in one process, with the roofline beside them.

Run ``python -m benchmarks`` from the root of a checkout. Nothing here is part of the installed
package, and no timing in here is a test that can fail.
"""
