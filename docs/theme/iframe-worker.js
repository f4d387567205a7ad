/* Search for pages that are read from a disk, where browsers start no workers: a worker's script in a hidden frame. */
(() => {
  if (location.protocol !== "file:") return;

  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      /* What the script says to its page, and how it asks for more scripts. */
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => load(inside, each)), Promise.resolve());
      load(inside, new URL(url, document.baseURI).href).then(() => {
        this.deliver = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
        this.waiting.forEach(this.deliver);
      });
      this.terminate = () => frame.remove();
    }

    postMessage(data) {
      if (this.deliver) this.deliver(data);
      else this.waiting.push(data);
    }
  }

  function load(inside, url) {
    return new Promise((loaded, failed) => {
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = loaded;
      script.onerror = failed;
      inside.document.body.appendChild(script);
    });
  }

  window.Worker = FrameWorker;
})();
