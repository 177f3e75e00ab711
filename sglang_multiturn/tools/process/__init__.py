"""`execution: process`: every instance of a tool in a process of its own, which can be killed with all it started.

    worker process            host.ProcessHost ── nursery_process ── connection (one an instance)
      │ orders, ends              │                                    │ calls, replies
      ▼                           ▼                                    │
    nursery process           makes the tool once, forks, watches, kills, reaps
      ├─ instance process     runs the tool's methods ◄────────────────┘
      │    └─ whatever the tool started
      └─ instance process

Invariants: whoever of them dies, nothing below it lives on; nothing that an instance's process sends, prints, allocates
or starts harms another one, the nursery or the worker. Linux only.
"""
