"""The values that cross process boundaries, and what both sides must compute alike.

Owns ids, messages, tickets, the error tree, block hashes and config types. Never imports torch,
opens no socket and reads no clock, so that the router and the tests can use all of it for free.
"""
