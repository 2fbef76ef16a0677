// Sends the secret of a one-time link, which is in the fragment of the address and so in no log.
"use strict";

function enter() {
  const secret = location.hash.slice(1);
  if (!secret) return;
  history.replaceState(null, "", location.pathname + location.search);
  const form = document.getElementById("link");
  form.elements.secret.value = secret;
  form.submit();
}

enter();
addEventListener("hashchange", enter);
