from typing import Any
def profile_report(*a: Any) -> bytes: return b""
